"""Fused kernels for GPUs, each beside its plain-JAX `reference` of the same signature."""
