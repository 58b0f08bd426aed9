"""Host memory: what waits there, how it gets there and back.

`host_memory` is the memory and the copies, `activations` which residuals of layers wait there,
`host_residuals` a function whose backward pass finds some of them there. `check_host_loops` tries
once whether XLA brings back from the host what was sent there.
"""
