"""A training run: configuration, loop, metrics, evaluation, text generation.

`config` defines every setting (`config_checks`: bounds of numbers,
`lora_config`: adapters); `strategy` makes the mesh, and
the strategy that its sizes describe. `build` makes the components of a run, with `optimizer` and
one of `tasks`, whose model comes from `model` or, for a folder, from `pretrained_model`.
`train_loop` trains, `sampling` evaluates and generates; `logs` are its metrics and lines, `profile`
its traces. `hub_sources` finds commits of the Hub and prepares its data sets, `chat_sources`
prepares files of chats, `source_snapshot` copies the model's folder into the run. `config_io` and
`yaml_fields` read and write configurations, `old_config` reads those of before, `deepspeed_flags`
those of DeepSpeed, `recipes` the files of hfjax/configs.
"""

from hfjax.utils.lazy_import import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
