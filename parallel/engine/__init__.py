"""The data plane: how a step gathers parameters, runs a model and reduces gradients.

A parameter is stored as a shard (`blueprint`, `fetch`), gathered where it is used (`layers` of a
model in three parts, `gather_on_use` of any other), and its gradient reduced (`reduce`,
`gradients`). What modules are handed for that is in `parallel/for_models`.
"""
