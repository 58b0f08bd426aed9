"""Offload to host memory.

`host_memory`: the memory and the copies. `activations`: which residuals of layers are offloaded.
`host_residuals`: a function with some of its residuals in host memory. `check_host_loops` tests
once whether XLA brings back from the host what was sent there.
"""
