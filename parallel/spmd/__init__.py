"""Partition a global program by rules: what DTensor is to PyTorch, for jaxprs.

A program is traced at global shapes; each device runs it on its shard of the values. `placements`
is what a device may hold of a value, `partition_context` one program that is being run and what it
communicates. `interpreter` runs it equation by equation, by the table of `rules`; `rule_calls` are
functions that a program keeps as one call with a rule of its own. `nested` partitions along two
kinds of axes at once: examples, and positions within them. `global_batch` shows a function the
global batch, `microbatches` deals examples so that microbatches are those of one device, `report`
is what a step says of communication that the user's program asks for.
"""
