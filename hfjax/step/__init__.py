"""One training step, one evaluation, one state: what a user jits, and how it is put together.

`train_step` is the step and the model that it leaves, `init_state` the state it starts from,
`eval_step` losses and predictions. `build` is the recipe of a step: which engine computes
gradients, which update follows. `batches` shards batches over devices and processes, `nonfinite`
reports steps whose loss or gradients were not finite.
"""
