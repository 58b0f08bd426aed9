"""Experts on several devices: how tokens get to them, what that sends, who holds which copy.

`dispatch` chooses the way, `token_exchange` goes it, `spread` is what mixtures are handed,
`balance` says which experts get a second copy.
"""
