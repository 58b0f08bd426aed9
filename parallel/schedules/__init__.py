"""Pipeline schedules: tables of which stage does what in which tick. Plain numpy, no JAX.

`table` is the table and its rules, `named` the schedules by their published names, `builders` those
who fill tables, `text` tables written as text, `cost` what a table costs (bubble, stash), `compile`
slots and links for the executor, `versions` the weights of asynchronous schedules.
"""

from hfjax.parallel.schedules.named import Schedule

__all__ = ["Schedule"]
