"""`hfjax memory`: what a training step would take, compiled before it runs.

`command` is the command, `alternatives` its settings; `memory_table` and `picture` show what the
planner's estimates tell.
"""
