"""The ground floor: fused kernels, each beside its plain-JAX `reference` of the same signature."""
