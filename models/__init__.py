"""Flax NNX modules in three parts (embed, layers, head). They name their axes and know no mesh.

`gpt` and `llama` are the models, of `layers`, `attention` and `rope`; `loss` is what they are
trained on. `model_config` is what their configurations share, `stateful` makes modules of
functions. Mixtures of experts are in `moe`, images in `vision`.
"""
