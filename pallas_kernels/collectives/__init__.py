"""All-gather and reduce-scatter that cast while sending and sum in float32.

`casting` has the functions, `kernel` their bodies, `reference` the same in plain JAX, `stream`
streams arrays through shared memory.
"""
