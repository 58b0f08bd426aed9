"""Matmuls beside their collective: shards go round the ring of GPUs while they are multiplied."""
