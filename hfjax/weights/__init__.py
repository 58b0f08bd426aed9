"""Models in and out: a folder from Hugging Face streams into any layout, and goes out again.

`families` is the table: a row for each. `config_keys` reads config.json, and `decoder_rules` says
which tensor lies where (`name_rules` says what a rule is). `model_folder` and `tensor_files` read
what is on disk, `rows_of_files` shares its rows out, `stream_in` and `write_out` move them.
`pretrained` has what users call.
"""
