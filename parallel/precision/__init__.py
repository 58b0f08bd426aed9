"""The dtypes in which a step computes, all-gathers and reduces.

`dtypes` has one precision for all parameters, and the loss scale of float16; `by_path` one per
pattern of paths; `auto` chooses by the device.
"""
