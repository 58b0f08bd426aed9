"""What a step hands to the modules of a model: kernels, the placing of activations, shared rows.

A module asks for it by an attribute (`self.place = anywhere`, `self.kernels = plain`), so that
models import nothing of the mesh. On a grid of tensor parallelism that is in `grid`. `on_shards`
runs a function on each tensor shard by itself.
"""
