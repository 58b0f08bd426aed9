"""Programs as data: JAX's traces cut into parts.

What a backward pass keeps of the forward pass (`program`, `saved`), and a layer's passes read apart
(`dissect`): into the gradient of its input and that of its weights. `in_turn` ties layers that are
in no loop to one another. `linear` reads whether a program is linear. `model_parts` is a model in
three parts as what runs it sees it. `check_host_loops` tries once whether XLA brings back from the
host what was sent there.
"""
