"""`hfjax plan`: finds the fastest layout that fits, predicts its time, and says why others lose.

`command` is the command, `settings` its settings, `hardware` the constants of the GPU and the path
of measured ones; `table` shows the plan, `compare` finds the one layout that flags describe,
`compare_table` compares it with the best, `timeline` shows a step to scale.
"""
