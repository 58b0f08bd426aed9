"""Utilities that everything may use.

Numbers: `mean` (a loss as total and weight), `mean_variance` (of channels), `head` (a linear map,
logits), `rounding` (numbers that stay rounded), `vma` (mesh axes over which values vary, for
shard_map's check_vma). Trees and text: `paths`, `tables`. Programs: `command_errors`, `keywords`,
`lazy_import`, `progress`, `renamed` (old names of modules), `trace_context`, `version`. Files:
`read_files`, `write_files`, `atomic`, `hub` (what the Hugging Face Hub has); `image_names`
recognizes images by their names.
"""
