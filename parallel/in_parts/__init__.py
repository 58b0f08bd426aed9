"""Programs in parts: a program traced at the sizes of all rows, run on the rows of a device.

`run` is the interpreter with the table of rules; `kinds` what a device may hold of a value; `scope`
one program that is being run, and what is told. The rules: `pointwise`, `moves`, `reductions`,
`indexing`, `random_bits`, `programs` (calls, loops, branches), `derivatives` (functions with a rule
of their own), `outside` (collectives and callbacks of the user's own).
"""

from hfjax.parallel.in_parts.kinds import Cut, Part, Side, Sum
from hfjax.parallel.in_parts.run import in_parts

__all__ = ["Cut", "Part", "Side", "Sum", "in_parts"]
