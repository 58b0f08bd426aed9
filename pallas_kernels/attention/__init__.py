"""Block-wise attention with explicit state, and its kernels.

`block` has the functions, `reference` their plain JAX. `launch` calls the kernels `forward`,
`backward` and `backward_keys`, which share `common`, `keys` (copies of key tiles) and `mask`
(which tiles are visited).
"""
