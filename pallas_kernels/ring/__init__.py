"""Matmuls beside their collective: shards go round the ring of GPUs while they are multiplied.

`products` chooses between kernel and `reference`, with gradients; `all_gather_matmul` and
`matmul_reduce_scatter` launch the kernels `gather` and `scatter`, which share `tiles` and `peers`.
"""
