"""Import and export of models: a Hugging Face folder streams into any layout, and back.

`families` is the table of model families. `config_keys` reads config.json (`config_values` checks
the types of values), and `decoder_rules` maps tensors to parameters (`tensor_rules` defines a
rule). `model_folder` and `tensor_files` read what is on disk, and `hub` makes a folder of a model's
name on the Hub. `file_rows` reads and writes each process's rows of tensors, `redistribute_rows`
moves them between files' and layout's sharding, `load` and `save` do so for a whole model.
`content_hash` is a hash of weights, and `pretrained` has the public functions.

Vision models are one file with torchvision's names: `vision_rules` maps tensors to parameters,
`vision_files` reads and writes it.
"""
