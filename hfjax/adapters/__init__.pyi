from hfjax.adapters.lora_model import Lora as Lora, lora as lora
from hfjax.adapters.peft_load import load_adapter as load_adapter
from hfjax.adapters.peft_save import export_adapter as export_adapter
