"""Extensions, each of which the core runs without: it imports none of them.

Each imports the core, and hfjax/step/build.py hands it in: `kernel_dispatch`, `context_parallel`,
`expert_parallel`, `tensor_grid`, `uneven_stages`, `async_pipeline`.
"""
