"""Rules of primitives, one kind a file: what a device computes of sharded or partial operands.

`pointwise`, `views` (reshapes, transposes, slices, concatenations), `reductions` (and matmuls),
`indexing`, `random_bits`, `control_flow` (calls, loops, branches), `custom_derivatives` (functions
with a derivative of their own) and `user_collectives` (the user's collectives and callbacks).
"""
