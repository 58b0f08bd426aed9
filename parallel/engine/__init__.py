"""The data plane: how a step gathers parameters, runs a model and reduces gradients.

`blueprint` is a model taken apart, `bare_trees` one that is a pytree, `built` one that cannot be
traced; `batch_norm` is over the rows of all devices, `forward_asks` what forward may ask for. A
parameter is stored as a shard and fetched (`fetch`, over the `legs` of a gather) where it is used,
and its gradient reduced (`reduce`, `gradients`). `layers` says how layers run, `on_rows` lets model
and loss see the rows of all devices (`gather_rows`: a loss that asks for them). `step_context` is
what all of them know of a step, `keys` its random numbers, `local` what modules ask of it.
"""
