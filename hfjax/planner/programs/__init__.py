"""Programs that a plan reads, and none that runs.

By formula: `model_profile` traces a model's step for each kind of recomputation, `read_program`
reads the trace, `program_costs` says what it costs; `placeholder_attention` stands for cuDNN's,
`model_calls` is what a model asks of a step.
Compiled: `compile_step` compiles one in a process of its own, `compile_candidates` asks for it and
caches what it reported, `live_bytes` reads what is live in its schedule. `planned_run` are the
parts of a run for devices that are not here, `estimate` what its step takes, for `hfjax memory`.
"""
