"""A configuration of DeepSpeed read as it is: `hfjax.from_deepspeed`, `hfjax train --deepspeed`.

`known_keys` is the table: each key of DeepSpeed, its default, and what becomes of it. `key_rows`
says what a row is, and `json_file` reads a file by them. `computed`, `placed` and `updated` take
precision, places and updates from it, with `lr_schedules` and `torch_updates`. `from_file` puts
it together.
"""
