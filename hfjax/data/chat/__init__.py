"""Conversations as data: which tokens a model reads, and which of them the loss counts.

`conversations` reads JSONL and Parquet; `template` finds a model's Jinja template and renders with
it in a process of its own, which runs `sandbox`; `special_tokens` marks those that a message
spells, which stay text; `turns` finds the assistant's parts of a rendered text; `encode` makes
tokens of it; `build_chats` writes them as a data set.
"""
