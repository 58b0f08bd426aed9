"""Pallas kernels in a step: which form each capability takes, and both forms on tensor shards."""
