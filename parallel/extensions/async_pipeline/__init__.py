"""Asynchronous pipelines: stages update their layers while microbatches are in flight.

PipeDream and PipeDream-2BW. Their results differ from those of one device, so they are separate:
steps that wait for all gradients need none of this. `engine` runs the step, `weight_stashing` keeps
the versions of weights that are still in use.
"""
