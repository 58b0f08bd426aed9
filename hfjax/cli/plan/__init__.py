"""`hfjax plan`: which layout of all is fastest and fits, how fast, and why the others are not.

`plan_command` is the command, `plan_settings` its settings, `chosen_machine` the constants it takes
and where measured ones lie; `plan_table` shows the plan, `why_words` finds the one configuration of
--why, `why_table` sets it beside the first, `timeline` is a step of one to scale.
"""
