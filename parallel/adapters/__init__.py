"""The user's model as a step sees it: arrays by path, and a function that merges them again.

`model_template` is a model without its arrays (Flax NNX, Linen), `pytrees` a model that is a bare
tree of arrays, `constructed` one whose constructor cannot be traced. `forward_signature` says what
a forward function asks for by name, `batch_norm` which statistics are those of the global batch.
"""
