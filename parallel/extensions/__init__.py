"""Optional extensions: the core runs without them, and imports none of them.

Each imports the core, and hfjax/step/build.py passes it in: `kernel_dispatch`, `context_parallel`,
`expert_parallel`, `tensor_grid`, `uneven_stages`, `async_pipeline`.
"""
