"""hfjax: train a model on more than one device. A strategy is a table; the program follows it.

`train` has `hfjax.train_step`, `initialise` the state, `evaluate` losses and predictions; `compose`
is the recipe of a step. `batches` brings batches to devices, `watch` warns of what is told late,
`target` is GPUs to compile for, `testing` compares strategies with one device.

The public names are listed in `__init__.pyi`. Each is imported when it is first asked for, so that
a launcher or `hfjax --version` needs no JAX.
"""

from hfjax.base.lazy import lazy_names
from hfjax.base.version import version as _version

__version__ = _version()
__getattr__, __dir__, __all__ = lazy_names(__name__)
