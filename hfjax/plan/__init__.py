"""The layout: where each array of a training state lies on a mesh, and what does not fit there.

A layout is made once, from a model, an optimizer, a mesh and a strategy (`layout`; `check_layout`
and `check_matrices` are what it refuses). `storage` is how a state stores layers, `on_stages` which
stage gets which, `hosted` what the host keeps, `report` what it prints, `xla_options` what XLA is
told. `rearrange` and `optimizer_state` move a state from one arrangement to another; `check_state`
refuses states of another layout. `same_rows` says which processes give the same rows.
"""

from hfjax.plan.layout import Layout, State

__all__ = ["Layout", "State"]
