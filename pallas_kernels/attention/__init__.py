"""Attention block by block with its state in and out (`block`), and its kernels."""
