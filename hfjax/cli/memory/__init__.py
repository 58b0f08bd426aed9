"""`hfjax memory`: what a training step would take, compiled before it runs.

`command` is the command, `settings` what it takes; `table` and `plot` show the planner's estimates.
"""
