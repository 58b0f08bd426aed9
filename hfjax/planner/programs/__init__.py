"""Programs that a plan reads, and none that runs.

By formula: `model_profile` traces a model's step for each kind of recomputation, `read_program`
reads the trace, `program_costs` tells what it costs; `stand_in` is attention in cuDNN's place,
`model_calls` what a model asks of a step.
Compiled: `compile_step` compiles one in a process of its own, `compiled` asks for it and keeps what
was told, `live_bytes` reads what is live in its schedule. `planned` are the parts of a run for
devices that are not here, `estimate` what its step takes, for `hfjax memory`.
"""
