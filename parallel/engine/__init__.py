"""The engine: how a step unshards parameters, runs a model and reduces gradients.

A parameter is stored as a shard and gathered where it is used (`unshard`, by the collectives of its
`comm_plan`), and its gradient is reduced (`reduce_gradients`). `gradient_engine` gives loss and
gradients of one step. `layer_remat` says what layers recompute, `gather_batch` is for losses that
ask for the global batch. `step_context` is what every engine knows of a step, `example_keys` its
random keys, `model_ops` the operations that modules call, `local_outputs` what a device returns of
a model's outputs in training.
"""
