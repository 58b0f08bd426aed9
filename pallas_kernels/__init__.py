"""Fused GPU kernels, each with a plain-JAX reference of the same signature.

One folder for each: `attention`, `cross_entropy`, `collectives`, `ring`. `capabilities` is how
models and losses declare that a kernel may replace plain JAX; `mosaic` and `plgpu` wrap Pallas's
Mosaic GPU, `current_platform` describes the devices that a program is traced for.
"""
