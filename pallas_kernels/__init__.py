"""Fused kernels for GPUs, each beside its plain-JAX reference of the same signature.

One folder for each: `attention`, `cross_entropy`, `collectives`, `ring`. `capabilities` is what
models and losses tell each other where a kernel takes the place of plain JAX; `mosaic` and `plgpu`
are Mosaic GPU of Pallas, `current_platform` the devices that a program is traced for.
"""
