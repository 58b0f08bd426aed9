"""Read a DeepSpeed configuration: `hfjax.compat.from_deepspeed`, `hfjax train --deepspeed`.

`known_keys` is the table: each key of DeepSpeed, its default, and how it is handled. `key_entries`
defines its entries, and `config_file` reads a file by them. `compute`, `parallelism` and
`optimizer` derive precision, sharding and updates, with `lr_schedules` and `torch_updates`.
`convert` combines the results.
"""
