"""Cross entropy over a vocabulary without storing its logits, and its kernels.

`loss` is the function, `logits` splits a vocabulary into parts, `tile_loop` assigns its tiles to a
GPU's thread blocks, `tiles` computes on each tile.
"""
