"""Programs in parts: traced at the sizes of the whole, run on the rows or positions of a device.

`interpreter` runs a program equation by equation, by the table of rules; `kinds` is what a device
may hold of a value; `scope` one program that is being run, and what is told. The rules are in
`pointwise`, `moves` (reshapes, slices …), `reductions` (and products), `indexing`, `random_bits`,
`programs` (calls, loops, branches), `derivatives` (functions with a rule of their own), `outside`
(collectives and callbacks of the user's own) and `named_calls` (what runs on each device's own rows
on request). `two_sides` runs one on positions within rows. `joins` is what a step says of rows that
meet. `microbatches` deals rows so that microbatches are those of one device.
"""
