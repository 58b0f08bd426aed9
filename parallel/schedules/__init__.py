"""Pipeline schedules: tables of which stage does what in which tick. Plain numpy, no JAX.

To add a schedule, write a function (stages, microbatches, chunks) -> Table in `builders` that ends
in `lay_out(…)`, and an entry of `SCHEDULES` in `named`. Pass `branches=True` only if stages must
run different kinds of tasks in one tick: they then skip idle slots on every mesh, and a permute in
a layer deadlocks. The tests run every entry; add its costs to tests/test_schedule_cost.py and
docs/pipelines.md, its name to the docstring of `Schedule`, and to `PIPELINES` in
hfjax/planner/search.py if plans are to try it.

`table` is the table, `check_table` its rules, `lay_out` makes one from orders, `named` has the
schedules by their published names, `builders` the functions that build tables, `text` tables
written as text, `cost` what a table costs (bubble, stash), `compile` slots and links for the
executor, `versions` the weight versions of asynchronous schedules.
"""
