"""Collectives with 8 bits an element and error feedback.

No training step uses them yet: they are functions for a shard_map of your own. `collectives` has
them, `kernel` their bodies, `reference` the same in plain JAX, `quantize` the 8 bits.
"""
