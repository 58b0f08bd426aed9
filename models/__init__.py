"""Layer-stack models (embed, layers, head) as Flax NNX modules with named axes, without a mesh.

`gpt` and `llama` are the models, built from `layers`, `attention` and `rope`; `loss` has their
loss. `model_config` is what their configurations share, `stateful` wraps functions as modules.
Mixtures of experts are in `moe`, vision models in `vision`.
"""
