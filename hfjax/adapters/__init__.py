"""Adapters: low-rank changes of a model's linear maps, trained in place of its own parameters.

`low_rank` (the module beside a linear map), `any_model` (W + s A B in a model that has no such
modules), `lora_model` (a model with adapters: which maps have one), `lora_options` (what may be
chosen), `base_weights` (the frozen weights below them, streamed and hashed), `adapter_weights`
(their own, of files), `merge_kernels` (W + s A B). Files of peft: `peft_rules` (names and shapes of
tensors), `peft_config` (adapter_config.json), `peft_load` and `peft_save`.
"""

from hfjax.utils.lazy_import import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
