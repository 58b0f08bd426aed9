"""Experts on several devices: how tokens get to them, and what that sends.

`dispatch_kinds` chooses the way, `token_exchange` goes it, `expert_dispatch` is what mixtures are
handed.
"""
