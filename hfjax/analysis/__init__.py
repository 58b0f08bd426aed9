"""Analysis of programs before they run, from their text or their jaxpr.

`count_collectives` counts collectives, with the readers `hlo` (compiled programs) and `stablehlo`
(what our source wrote). `count_transfers` counts copies between host and device, with
`memory_copies`; `residuals` lists what is saved for the backward pass, `search_offload` finds the
least offload with which a step fits. `overlap` reads which collectives of a GPU program run under a
matmul, and its matmuls; `matmul_time` models how long those take. `targets` are GPUs to compile for
that need not be here.
"""

from hfjax.utils.lazy_import import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
