"""Pipelines of layers that differ: a list of layers in place of one stack of equal ones.

Stages store their parameters packed into buffers of one length (parallel/packing.py), and a switch
chooses what a stage runs (`stage_units`). Models with stacked layers need none of this.
"""
