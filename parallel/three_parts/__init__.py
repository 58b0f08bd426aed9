"""Models in three parts: what is before their layers, the layers, and what is after them.

`run_layers` runs the layers, each the unit of gathering and of rematerialisation, in a loop or,
tied to one another, in none (`layers_in_turn`), with `row_parts` on two parts of the rows; `ends`
runs what lies around them. `in_three_parts` is the whole model forward, which JAX differentiates;
`placed_model` are its parts as functions of one microbatch, which pipelines and the loop over
layers run.
"""
