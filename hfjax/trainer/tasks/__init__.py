"""Tasks: everything that differs between training on text, on images and on a user's own data.

`task` is the interface; `text` implements it for tokens, `images` for images, `own_data` for what a
user's function returns.
"""
