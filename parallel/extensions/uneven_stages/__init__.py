"""Pipelines of layers that differ: a list of them in place of one stack of equal ones.

Stages store their parameters packed into rows of one length (parallel/packing.py), and a switch
chooses what a stage runs (`stage_units`). Nobody whose layers are stacked needs to read this.
"""
