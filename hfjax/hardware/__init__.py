"""What each GPU can do: a file of constants for each, with the source of each constant.

`machine` reads, checks and writes such files. a100.toml, b200.toml, h100.toml, h200.toml, l40s.toml
and v100.toml are here; `hfjax memory`, MFU in the log and the benchmarks read them.
"""
