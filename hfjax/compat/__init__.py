"""Configurations and objects of other libraries, read as they are.

`deepspeed` reads a DeepSpeed configuration, `haiscale` has haiscale's pipelines as objects.
"""
