"""What everything may use: means, paths of trees, tables of text, exits, files, progress.

`varying` says over which axes of a mesh values differ, for a `shard_map` that tracks it.
"""
