"""The data plane: how a step gathers parameters, runs a model and reduces gradients.

A parameter is stored as a shard (`blueprint`, `fetch`), gathered where it is used (`layers` of a
model in three parts, `gather_on_use` of any other), and its gradient reduced (`reduce`,
`gradients`). Kernels are handed to modules (`kernels`, `sharded_kernels`, `shared_rows`,
`on_shards`), and so is the placing of activations (`place`).
"""
