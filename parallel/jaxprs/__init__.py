"""Programs as data: JAX's traces cut into parts.

What a backward pass keeps of the forward pass (`program`), and a layer's passes read apart
(`split_backward`): into the gradient of its input and that of its weights. `ordered_layers` ties
layers that are in no loop to one another. `linearity` reads whether a program is linear.
`stage_fns` is a model of embed, layers and head as the functions that a stage runs.
"""
