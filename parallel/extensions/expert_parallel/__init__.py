"""Expert parallelism: how tokens are dispatched to experts, and what that sends.

`dispatch_kinds` chooses the dispatch, `token_exchange` runs it, `expert_dispatch` is passed to
mixtures.
"""
