"""Collectives with 8 bits an element and error feedback.

No training step uses them yet: they are functions for a `shard_map` of your own.
"""
