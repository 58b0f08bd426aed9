"""What a program does, read from its text or its jaxpr before it runs.

`count_collectives` counts what is sent, by the readers `hlo` (compiled programs) and `stablehlo`
(what our source wrote). `count_transfers` counts copies between host and device, by
`memory_copies`; `residuals` is what loops keep for the backward pass, `search_offload` the least
offload with which a step fits. `overlap` reads which collectives of a GPU program run under a
matmul, and its matmuls; `matmul_time` says how long those take. `targets` are GPUs to compile for
that need not be here.
"""
