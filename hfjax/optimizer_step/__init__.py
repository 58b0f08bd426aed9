"""The four ways to update a state once gradients are there, and what they share.

Every device its shard (`sharded`), streamed through the device from host memory (`cpu_offload`),
layer by layer inside the backward pass, from host memory too (`in_backward`), stage by stage in an
asynchronous pipeline (`async_pipeline`). `update` is their interface, `optimizer_parts` an
optimizer run on one part after another, `master_sync` makes master weights and averages follow
parameters that were put into a state, `param_all_gather` gathers what devices have updated in
shards, `loss_scale` is what float16 needs. `hfjax/step/build.py` chooses.
"""
