"""The layout: where each array of a training state lies on a mesh, and what does not fit there.

A layout is made once, from a model, an optimizer, a mesh and a strategy (`layout`; `check_layout`
and `check_matrices` are what it refuses). `storage` is how a state stores layers,
`stage_assignment` which stage gets which, `host_memory` what lies on the host, `report` what it
prints, `xla_options` what XLA is told. `reorder_layers` and `optimizer_state` move a state from one
arrangement to another; `check_state` refuses states of another layout. `check_process_batches` says
which processes give the same examples.
"""

from hfjax.sharding.layout import Layout, State

__all__ = ["Layout", "State"]
