from hfjax.adapters.adapted_model import Lora as Lora, lora as lora
