"""The four ways to update a state once gradients are there, and what they share.

As a whole (`whole`), streamed through the device from host memory (`streamed`), layer by layer
inside the backward pass, from host memory too (`in_backward`), stage by stage in an asynchronous
pipeline (`asynchronous`). `update` is their interface, `optimizer_parts` an optimizer run on one
part after another, `given_parameters` one that is handed parameters with the gradients, `gathered`
puts together what devices have updated in parts, `loss_scale` is what float16 needs.
`hfjax/compose.py` chooses.
"""
