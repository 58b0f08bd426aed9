"""Attention block by block with its state in and out, and its kernels.

`block` is the function, `reference` its plain JAX. `launch` goes from operands to the kernels
`forward`, `backward` and `backward_keys`, which share `common`, `keys` (tiles on their way) and
`mask` (which tiles are visited).
"""
