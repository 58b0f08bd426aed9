"""The training step, the evaluation step and the initial state, and how a step is built.

`train_step` is the step, `step_program` what it computes, `merge_model` the model that it leaves;
`init_state` creates the state it starts from, `eval_step` computes losses and predictions. `build`
assembles a step from its `step_spec`: which engine computes gradients, which update follows.
`batches` shards batches over devices and processes, `extra_arrays` are those beside it, `nonfinite`
reports steps whose loss or gradients were not finite.
"""
