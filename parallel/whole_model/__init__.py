"""Whole models: the user's own program is traced, and run on a device's examples.

`model` is what a step runs in place of a layer stack; `unshard_on_use` gathers each parameter where
the program first uses it; `offload_block` keeps some residuals of a block of a user's model in host
memory.
"""
