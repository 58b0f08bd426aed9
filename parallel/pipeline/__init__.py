"""Pipelines: one jitted program in which each stage does what its schedule says.

`executor` runs a table tick by tick, `rings` holds what stages send and keep, `plane` joins it to
the data plane. `heterogeneous` and `packing` are for layers that differ from each other,
`layer_costs` balances them, `asynchronous` is PipeDream without a flush.
"""
