from hfjax.optimizers.muon_by_names import muon as muon
from hfjax.optimizers.rates import lr_schedule as lr_schedule
from hfjax.optimizers.transforms import (
    adamw as adamw,
    averaged as averaged,
    by_path as by_path,
    ema as ema,
    master_weights as master_weights,
    matching as matching,
    scaled as scaled,
)
