"""The mechanisms of parallel training.

The files here say what is wanted. Where: `mesh`, `make_mesh`, `strategy`, `param_specs`,
`activation_sharding`, `layer_order` (layers on stages), `layer_costs`, `packing` (arrays that
differ by stage). How: `execution`, `settings`, `remat`, `compiler_options`, and the folder
`precision`. The other folders do it: `engine` (gathers parameters, reduces gradients), on models
taken apart by `adapters`: `whole_model` (models that are called as they are), `layer_stack` (models
whose layers are known), `pipeline` and `layerwise`. They stand on `spmd` (global programs
partitioned by rules), `schedules`, `offload` and `jaxprs`; what is special lies in `extensions`,
which none of them imports.
"""
