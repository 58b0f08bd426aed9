"""Pipelines: one jitted program in which each stage follows the table of its schedule.

`executor` runs the table tick by tick. `tick`: the table's entries for a stage. `stash_buffers`:
ring buffers of a stage, and sends. `stage_params`: its parameters and their gradients.
`overlapped_grad_reduce`: gradients summed over devices in the last tick.
`activation_checkpointing`: a last microbatch without recomputation. `idle_slots`: slots that skip
their layers. `engine`: the gradient engine of a pipeline.
"""
