"""A training run: configuration, loop, metrics, evaluation, text.

`config` has every setting; `build` makes what runs of them, with `optimizer` and one of `tasks`,
whose model is that of `model` (of a folder: `pretrained_model`). `train_loop` trains, `sampling`
evaluates and generates; `source_snapshot` is what a run copies of its model's folder. `config_io`
and `yaml_fields` read and write configurations, `deepspeed_flags` those of DeepSpeed;
`metrics_file`, `loss_plot`, `profile` and `console` are what a run leaves and shows.
"""

from hfjax.utils.lazy_import import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
