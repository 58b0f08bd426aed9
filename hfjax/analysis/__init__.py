"""What a program does, read from its text or its jaxpr before it runs.

Collectives with their bytes and counts, copies between host and device, what loops stash for the
backward pass, and the least offload with which a step fits.
"""
