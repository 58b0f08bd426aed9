"""The mechanisms of parallel training.

The files here declare what is wanted. Where: `mesh`, `make_mesh`, `strategy`, `param_specs`,
`activation_sharding`, `layer_order` (layers on stages), `layer_costs`, `packing` (arrays that
differ by stage). How: `execution`, `settings`, `remat`, `compiler_options`, and the folder
`precision`. The other folders do it: `engine` unshards parameters and reduces gradients of models
split by `adapters`: `whole_model` (the user's own call), `layer_stack` (embed, layers, head),
`pipeline` and `layerwise`. They build on `spmd` (global programs partitioned by rules),
`schedules`, `offload` and `jaxprs`. Optional features are in `extensions`, which none of them
imports.
"""
