"""Experts on several devices: how tokens get to them, and what that sends.

`dispatch` chooses the way, `token_exchange` goes it, `spread` is what mixtures are handed.
"""
