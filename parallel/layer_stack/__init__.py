"""Models that are a stack of layers between an embedding and a head.

`run_layers` runs the layers, each the unit of gathering and of rematerialisation, in a loop or,
tied to one another, in none (`ordered_layers`), with `batch_split` on two parts of the batch;
`embed_and_head` runs what lies around them. `model` is the whole model forward, which JAX
differentiates; `sharded_model` are its parts as functions of one microbatch, which pipelines and
the loop over layers run.
"""
