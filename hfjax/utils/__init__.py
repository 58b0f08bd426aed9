"""What everything may use.

Numbers: `mean` (a loss as total and weight), `mean_variance` (of channels), `head` (a linear map,
logits), `rounding` (numbers that stay rounded), `vma` (over which axes values differ, for a
shard_map that tracks it). Trees and text: `paths`, `tables`. A program's manners:
`command_errors`, `keywords`, `lazy_import`, `progress`, `renamed` (modules of before), `version`.
Files: `read_files`, `write_files`, `atomic`; `image_names` tells images by their names.
"""
