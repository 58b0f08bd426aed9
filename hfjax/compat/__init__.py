"""Compatibility with configurations and objects of other libraries.

`deepspeed` reads a DeepSpeed configuration, `haiscale` provides haiscale's pipelines as objects.
"""
