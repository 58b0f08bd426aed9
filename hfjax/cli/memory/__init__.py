"""`hfjax memory`: what a training step would take, compiled before it runs.

`command` is the command, `alternatives` its settings, `planned` a run for devices that need not be
here, `estimate` what a step takes; `memory_table` and `picture` show it.
"""
