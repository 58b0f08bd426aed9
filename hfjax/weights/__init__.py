"""Models in and out: a folder from Hugging Face streams into any layout, and goes out again.

`families` is the table: an entry for each. `config_keys` reads config.json (`config_values` says of
which type each value is), and `decoder_rules` says which tensor lies where (`tensor_rules` says
what a rule is). `model_folder` and `tensor_files` read what is on disk. `file_rows` shares the rows
of tensors out, `redistribute_rows` brings them to where a layout has them, `load` and `save` do so
for a whole model. `pretrained` has what users call.

Models of images are one file with torchvision's names: `vision_rules` says which tensor lies where,
`vision_files` reads and writes it.
"""
