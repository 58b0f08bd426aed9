"""Pretrained weights, in and out, as Hugging Face keeps them in files.

`config_keys` reads the shape of a model from the keys of its `config.json`, of which
`config_values` knows the types and defaults.
"""
