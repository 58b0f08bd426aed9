"""What trained models on several devices before, each written as its paper describes it.

They are for comparison, hfjax uses none of them: `examples/why_all_reduce.py` counts what they
send. torch's DataParallel (`data_parallel`) and a parameter server (`parameter_server`), the
all-reduces that replaced them (`ring`, `halving_doubling`, `two_level`; a step that takes one:
`training`; arrays in `pieces`), and matrices that are split in two dimensions (`summa`) and a half
(`tesseract`). All are functions of what one device has: call them in a `jax.shard_map`. They send
with `jax.lax.ppermute` only, so `links` counts what each link carries, and tests/test_baselines.py
compares it with the formula in the docstring of each file.
"""
