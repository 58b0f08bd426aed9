"""What everything may use.

Numbers: `mean` (a loss as total and weight), `moments` (of channels), `head` (a linear map,
logits), `rounding` (numbers that stay rounded), `varying` (over which axes values differ, for a
shard_map that tracks it). Trees and text: `paths`, `tables`. A program's manners: `exits`,
`keywords`, `lazy` (names that are imported late), `progress`, `version`. Files: `read_files`,
`write_files`, `atomic`; `image_names` tells images by their names.
"""
