"""Plans: the layout of a step, its time and its memory. The code of a step does not depend on it.

`make_plan` scores what `search` yields and says why others lose (`explain`); `candidate` is one way
to run a step. `score` gets seconds from `step_time` and bytes from `peak_memory`, which use
`comm_model` for collectives and `memory_model` for arrays. The best candidates are compiled, and
their programs give `corrections`. `programs` traces, reads and compiles; `calibration` measures
devices.
"""
