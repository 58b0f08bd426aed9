"""haiscale's pipelines as objects (`PipeDream`, `GPipe`, `Interleaved1F1B`) and partitions.

`pipe` has the objects, `partition` the partitions, `checks` their input checks.
"""
