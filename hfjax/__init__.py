"""hfjax: train a model on more than one device. A strategy is a table; the program follows it.

The public names are listed in `__init__.pyi`. Each is imported when it is first asked for, so that
a launcher or `hfjax --version` needs no JAX.

A training step is in `step`, where its arrays lie in `sharding`; what it runs is in `parallel` (the
mechanisms), `models`, `pallas_kernels`, `optimizers` and `optimizer_step`. What it refuses is in
`checks`. A run on top of it: `trainer`, `data`, `checkpoint`, `weights`, `distributed`. What a
program sends and keeps is read by `analysis`, predicted by `planner` with the constants of
`hardware`. `cli` has the commands, `compat` other libraries' configurations and objects, `testing`
compares strategies with one device, `utils` is what everything may use.
"""

from hfjax.utils.lazy_import import lazy_names
from hfjax.utils.version import version as _version

__version__ = _version()
__getattr__, __dir__, __all__ = lazy_names(__name__)
