"""Pipelines: one jitted program in which each stage does what its schedule says.

`executor` runs a table tick by tick: `tick` what a stage does in one, `stash_buffers` what stages
send and keep, `stage_params` where its parameters and their gradients lie, `overlapped_grad_reduce`
their sums over devices in the last tick, `activation_checkpointing` a last microbatch that
recomputes nothing, `idle_slots` what they leave out. `engine` joins it to the data plane.
"""
