"""Checks of what a user gives: settings, features together, models, optimizers, what XLA made.

They are called by name: of a step by hfjax/compose.py, of an evaluation by hfjax/evaluate.py, of
haiscale's pipes by hfjax/haiscale/pipe.py; no data plane calls one.
`check_step` is what a step refuses; `features` and `combinations` are the table of what goes
together; `optimizers` asks whether an optimizer works entry by entry, of its own program
(`optimizer_program`, and `at_zero` for empty places). `look` runs a model for a look at which
attentions it asks for along its rows (`look_along_rows`, with the stand-in `along_rows`), and
which products precision by path makes wider (`products_by_path`).
`branches` reads compiled pipelines, `jax_errors` puts errors of JAX in hfjax's words.
"""
