"""The layout: how each array of a training state is sharded on a mesh, and what does not fit there.

A layout is made once, from a model, an optimizer, a mesh and a strategy (`layout`; `check_layout`
and `check_matrices` are what it refuses). `axis_names` are the names of dimensions that it is
given, `read_axes` reads them from a program. `state` is what it places, `storage` how a state
stores layers, `stage_assignment` which stage gets which, `host_memory` what is in host memory,
`own_mesh` its specs on a mesh of the user's own, `report` what it prints, `xla_options` its
compiler options. `reorder_layers` and `optimizer_state` convert a state from one arrangement to
another; `check_state` refuses states of another layout. `check_process_batches` says which
processes pass the same examples.
"""

from hfjax.sharding.layout import Layout, State

__all__ = ["Layout", "State"]
