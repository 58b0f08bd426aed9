"""Wrappers of any optax optimizer, and Muon by the names of dimensions.

`transforms` (by path, averages, master weights), `rates`, `layout_axes` (what an optimizer may read
of a layout); `muon_by_names` (the optimizer), `matrix_axes` (which dimensions are a matrix),
`matrix_exchange` (whole matrices on each device).
"""

from hfjax.utils.lazy_import import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
