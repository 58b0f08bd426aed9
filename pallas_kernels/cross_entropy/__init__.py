"""The loss of a vocabulary without its logits, and its kernels.

`loss` is the function, `logits` a vocabulary in parts, `walk` deals its tiles to a GPU's blocks,
`tiles` is what is made of each.
"""
