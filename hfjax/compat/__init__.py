"""Compatibility with configurations and objects of other libraries.

`deepspeed` reads a DeepSpeed configuration, `haiscale` provides haiscale's pipelines as objects.
"""

from hfjax.utils.lazy_import import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
