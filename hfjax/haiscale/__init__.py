"""haiscale's pipelines as objects (`PipeDream`, `GPipe`, `Interleaved1F1B`) and partitions."""
