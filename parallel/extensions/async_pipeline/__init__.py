"""Asynchronous pipelines: stages update their layers while microbatches are in flight.

PipeDream and PipeDream-2BW. What they compute is not what one device computes, so they lie apart:
nothing that waits for all gradients needs this. `engine` runs the step, `weight_stashing` keeps the
versions of weights that are still in use.
"""
