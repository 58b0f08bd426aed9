"""Pallas kernels in a step: which implementation each capability uses, and both on tensor shards.

`ops` are the model's ops; `batch_stats` is one of them, mean and variance over the global batch.
`choose_kernel` chooses an implementation, `tensor_sharded` has the implementations, `per_shard`
runs one of them on each tensor shard.
"""
