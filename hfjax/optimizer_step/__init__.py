"""The four ways to update a state once gradients are there, and what they share.

Each device updates its shard (`sharded`); arrays in host memory stream through the device
(`cpu_offload`); each layer is updated inside the backward pass, also from host memory
(`in_backward`); each stage updates by itself in an asynchronous pipeline (`async_pipeline`).
`gradients` are what `step.gradients` returns, `update` is their interface, `optimizer_parts` runs
an optimizer on one part after another, `master_sync` syncs master weights and averages with
parameters that were put into a state, `gather_updated_params` gathers parameters that were updated
in shards, `loss_scale` is what float16 needs. `hfjax/step/build.py` chooses.
"""
