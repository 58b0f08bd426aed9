"""Jaxprs as data: reading and splitting the programs that JAX traces.

`primitives` says what primitives do, `walk` walks over equations, `bind` runs one. `model_mesh` is
the mesh that a model sees which places its arrays itself. `program` finds the residuals
that a backward pass needs of the forward pass, `saved_tensor` describes them; `split_backward`
splits a layer's backward pass into the gradient of its input and that of its weights.
`layer_barriers` ties unrolled layers to one another. `linearity` reads whether a program is linear,
`dimensions` which dimensions of its arrays are one. `stage_fns` is a layer-stack model as the
functions that a stage runs. `bind` runs an equation, `model_mesh` is the mesh that a model sees.
"""
