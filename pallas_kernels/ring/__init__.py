"""Matmuls overlapped with their collective: shards travel a ring of GPUs while being multiplied.

`products` makes kernels and `reference` differentiable; `all_gather_matmul` and
`matmul_reduce_scatter` launch the kernels `gather` and `scatter`, which share `tiles` and `peers`.
"""
