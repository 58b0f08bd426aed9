"""Models that are called as they are: their own program is traced, and run on a device's examples.

`model` is what a step runs in place of a layer stack; `unshard_on_use` gathers each parameter where
the program first uses it; `offload_block` keeps some of what a block of a user's model saves on the
host.
"""
