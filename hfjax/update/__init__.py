"""The four ways to update a state once gradients are there, and what they share.

As a whole (`whole`), streamed through the device from host memory (`streamed`), layer by layer
inside the backward pass, from host memory too (`in_backward`), stage by stage in an asynchronous
pipeline (`asynchronous`). `hfjax/compose.py` chooses.
`separable` finds out whether an optimizer can be cut up so.
"""
