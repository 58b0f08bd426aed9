"""What each GPU can do: one file of constants for each, and each constant says its source.

`machine` reads, checks and writes such files. a100.toml, b200.toml, h100.toml, h200.toml, l40s.toml
and v100.toml lie here; `hfjax memory`, MFU in the log and the benchmarks read them.
"""
