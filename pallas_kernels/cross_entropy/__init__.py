"""The loss of a vocabulary without its logits, and its kernels.

`loss` is the function, `logits` a vocabulary in parts, `tile_loop` deals its tiles to a GPU's
blocks, `tiles` is what is made of each.
"""
