from hfjax.adapters.lora import Lora as Lora, lora as lora
