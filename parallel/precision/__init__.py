"""In which dtypes a step computes, gathers and reduces.

`dtypes` has one precision for all parameters, and the loss scale of float16; `by_path` one for each
pattern of paths.
"""
