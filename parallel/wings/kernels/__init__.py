"""Pallas kernels in a step: which form each capability takes, and both forms on tensor shards.

`in_step` is what modules are handed; `row_moments` is one part of it, mean and variance over the
rows of all devices. `measured` is the table by which a form is chosen, `on_tensor_shards` the
forms, `kernel_on_shards` what runs one of them on each tensor shard.
"""
