"""`hfjax plan`: which layout of all is fastest and fits, how fast, and why the others are not.

`command` is the command, `settings` what it takes, `hardware` the constants of the GPU and where
measured ones lie; `table` shows the plan, `compare` finds the one configuration of --why,
`compare_table` sets it beside the first, `timeline` is a step of one to scale.
"""
