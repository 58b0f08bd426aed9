"""The layout: where each array of a training state lies on a mesh, and what does not fit there.

A layout is made once, from a model, an optimizer, a mesh and a strategy. It places parameters and
moments (`layout`, `stored`), arranges layers for pipeline stages (`on_stages`), says what the host
keeps (`hosted`), reports what a strategy could not do (`report`), and moves a state from one
arrangement to another (`rearrange`, `optimizer_state`). States that are not of a layout are refused
(`check_state`).
"""

from hfjax.plan.layout import Layout, State

__all__ = ["Layout", "State"]
