"""A training run: configuration, loop, metrics, evaluation, text.

`config` has every setting; `build` makes what runs of them, with `optimizer` and one of `tasks`,
whose model is that of `chosen_model` (of a folder: `pretrained_model`). `loop` trains, `sampling`
evaluates and generates; `own_copy` is what a run keeps of its model's folder. `files` and
`yaml_text` read and write configurations, `deepspeed_flags` those of DeepSpeed; `journal`,
`loss_picture`, `profile` and `screen` are what a run leaves and shows.
"""

from typing import TYPE_CHECKING, Any

from hfjax.base.exits import imported

if TYPE_CHECKING:
    from hfjax.run.build import Parts
    from hfjax.run.config import Train
    from hfjax.run.files import load
    from hfjax.run.loop import Result, train
    from hfjax.run.sampling import evaluate, generate

_MODULES = {
    "Parts": "build",
    "Result": "loop",
    "Train": "config",
    "evaluate": "sampling",
    "generate": "sampling",
    "load": "files",
    "train": "loop",
}
__all__ = ["Parts", "Result", "Train", "evaluate", "generate", "load", "train"]


def __getattr__(name: str) -> Any:
    """Return a public name, its module imported only now."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(imported(f"{__name__}.{_MODULES[name]}", f"{__name__}.{name}"), name)
