"""Tasks: everything that differs between training on text and on images.

`task` is the interface; `text` implements it for tokens, `images` for images.
"""
