"""What a run learns from: everything that differs between text and images.

`task` is what a run asks of it; `text` answers for tokens, `images` for images.
"""
