"""Checks of what a user gives: settings, features together, models, optimizers, what XLA made.

Train, evaluate and the pipes call them by name, through hfjax/compose.py; no data plane does.
`check_step` is what a step refuses; `features` and `combinations` are the table of what goes
together; `optimizers` asks whether an optimizer works entry by entry, of its own program
(`optimizer_program`, and `at_zero` for empty places). `look` runs a model for a look at which
attentions it asks for along its rows (`look_along_rows`, with the stand-in `along_rows`), and
which products precision by path makes wider (`products_by_path`).
`branches` reads compiled pipelines, `jax_errors` puts errors of JAX in hfjax's words.
"""
