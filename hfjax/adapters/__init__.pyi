from hfjax.adapters.lora_model import Lora as Lora, lora as lora
