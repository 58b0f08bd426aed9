"""Models that are a stack of layers between an embedding and a head.

`run_layers` runs the layers, each the unit of gathering and of rematerialisation, in a loop or
unrolled, tied to one another (`unrolled_layers`), with `batch_split` on chunks of the batch;
`embed_and_head` runs embed and head. `model` is the forward pass of the model, which JAX
differentiates; `bound_model` has its parts as functions of one microbatch, for pipelines and
the loop over layers.
"""
