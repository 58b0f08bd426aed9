"""Pipelines: one jitted program in which each stage does what its schedule says.

`executor` runs a table tick by tick: `tick` what a stage does in one, `rings` what stages send and
keep, `weights` where its parameters and their gradients lie, `reduced` their sums over devices in
the last tick, `recompute` a last microbatch that recomputes nothing, `skipping` what idle slots
leave out. `plane` joins it to the data plane.
"""
