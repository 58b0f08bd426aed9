"""Pallas kernels in a step: which form each capability takes, and both forms on tensor shards.

`ops` is what modules are handed; `batch_stats` is one part of it, mean and variance over the
global batch. `choose_kernel` is the table by which a form is chosen, `tensor_sharded` the forms,
`per_shard` what runs one of them on each tensor shard.
"""
