"""A training run: configuration, loop, metrics, evaluation, text.

`config` has every setting; `build` makes what runs of them, with `optimizer` and one of `tasks`,
whose model is that of `chosen_model` (of a folder: `pretrained_model`). `loop` trains, `sampling`
evaluates and generates; `own_copy` is what a run keeps of its model's folder. `files` and
`yaml_text` read and write configurations, `deepspeed_flags` those of DeepSpeed; `journal`,
`loss_picture`, `profile` and `screen` are what a run leaves and shows.
"""

from hfjax.base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
