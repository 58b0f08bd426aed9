from hfjax.compat.deepspeed.convert import from_deepspeed as from_deepspeed
from hfjax.compat.haiscale.partition import Partition as Partition, partition as partition
from hfjax.compat.haiscale.pipe import (
    GPipe as GPipe,
    Interleaved1F1B as Interleaved1F1B,
    PipeDream as PipeDream,
)
