"""The mechanisms of parallel training.

The files here say what is wanted. Where: `mesh`, `make_mesh`, `strategy`, `placement`, `place`
(activations), `arrangement` (layers on stages), `layer_costs`, `packing` (arrays that differ by
stage), `memory` (of the host). How: `execution`, `settings`, `remat`, `activation_offload`,
`compiler`, and the folder `precision`. The other folders do it: `engine` (the data plane), `called`
(models that are called as they are), `three_parts` (models whose layers are known), `pipeline`,
`layerwise`, on top of `in_parts` (programs on a device's rows), `schedules` and `autodiff`; what is
special lies in `wings`, which none of them imports.
"""
