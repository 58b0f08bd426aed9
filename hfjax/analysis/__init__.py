"""What a program does, read from its text or its jaxpr before it runs.

`collectives` counts what is sent, by the readers `hlo` (compiled programs) and `stablehlo` (what
our source wrote). `transfers` counts copies between host and device, by `memory_copies`; `stashes`
is what loops keep for the backward pass, `least_offload` the least offload with which a step fits.
`flights` reads which collectives of a GPU program run under a matmul, and its matmuls;
`product_time` says how long those take.
"""
