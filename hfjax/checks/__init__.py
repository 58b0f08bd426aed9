"""Checks of what a user gives: settings, features together, models, optimizers, compiled programs.

They are called by name: for a step by hfjax/step/build.py, for an evaluation by
hfjax/step/eval_step.py, for haiscale's pipes by hfjax/compat/haiscale/pipe.py; no engine calls one.
`check_step` is what a step refuses; `features` and `feature_conflicts` are the table of what goes
together; `optimizers` checks whether an optimizer works entry by entry, from its own program
(`optimizer_program`, and `padding` for the padding of packed arrays). `probe` traces a model for
the step that will run it; `probe_model` lets `upcasts` read there which matmuls a precision by path
would upcast, and the operations of modules which attentions are called. `deadlock` reads compiled
pipelines, `jax_errors` rewords errors of JAX.
"""
