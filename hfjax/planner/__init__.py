"""Plans: which layout of all, how fast, with how much memory. Nothing in a step knows of it.

`make_plan` scores what `search` yields and says why others lose (`explain`); `candidate` is one way
to run a step. `score` asks `step_time` for its seconds and `peak_memory` for its bytes, with what
`comm_model` counts of collectives and `memory_model` of arrays. The best are compiled, and get
`corrections` by that. `programs` has what is traced, read and compiled, `calibration` what is
timed.
"""
