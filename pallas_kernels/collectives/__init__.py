"""All-gather and reduce-scatter that cast while they send and add in float32.

`casting` has the functions, `kernel` their bodies, `reference` the same in plain JAX, `stream` how
arrays pass through shared memory.
"""
