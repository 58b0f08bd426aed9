"""What a run learns from: everything that differs between text and images.

`task` is what a run asks of it; `texts` answers for tokens, `pictures` for images.
"""
