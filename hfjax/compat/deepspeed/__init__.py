"""A configuration of DeepSpeed read as it is: `hfjax.from_deepspeed`, `hfjax train --deepspeed`.

`known_keys` is the table: each key of DeepSpeed, its default, and what becomes of it. `key_entries`
says what an entry is, and `config_file` reads a file by them. `compute`, `parallelism` and
`optimizer` take precision, sharding and updates from it, with `lr_schedules` and `torch_updates`.
`convert` puts it together.
"""
