"""`hfjax memory`: the memory of a training step, compiled before it runs.

`command` is the command, `settings` its settings; `table` and `plot` show the planner's estimates.
"""
