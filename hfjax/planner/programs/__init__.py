"""Programs that a plan reads but never runs.

By formula: `model_profile` traces a model's step for each kind of rematerialization, `read_program`
reads the trace, `program_costs` computes what it costs; `placeholder_attention` replaces cuDNN's,
`model_calls` records what a model asks of a step.
Compiled: `compile_step` compiles one in its own process, `compile_candidates` starts it and caches
its report, `live_bytes` reads what is live in its schedule. `planned_run` has the components of a
run for devices that need not be here, `estimate` the memory of its step, for `hfjax memory`.
"""
