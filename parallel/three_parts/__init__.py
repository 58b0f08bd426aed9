"""Models in three parts: what is before their layers, the layers, and what is after them.

`ends` runs what lies around the layers. `in_three_parts` is the whole model forward, which JAX
differentiates; `placed_model` are its parts as functions of one microbatch, which pipelines
and the loop over layers run.
"""
