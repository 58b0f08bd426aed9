"""Checks of what a user gives: settings, features together, models, optimizers, what XLA made.

They are called by name: of a step by hfjax/step/build.py, of an evaluation by
hfjax/step/eval_step.py, of haiscale's pipes by hfjax/compat/haiscale/pipe.py; no engine calls one.
`check_step` is what a step refuses; `features` and `combinations` are the table of what goes
together; `optimizers` asks whether an optimizer works entry by entry, of its own program
(`optimizer_program`, and `padding` for the empty places of packed arrays). `probe` traces a model
once to see which attentions it asks for along its sequences (`probe_model`, with the operations of
`probe_ops`), and which matmuls a precision by path would upcast (`upcasts`). `deadlock` reads
compiled pipelines, `jax_errors` puts errors of JAX in hfjax's words.
"""
