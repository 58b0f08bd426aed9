"""Special parts, each of which the core runs without: it imports none of them.

Each wing imports the core, and hfjax/compose.py hands it in: `kernels`, `context`, `experts`,
`grid`, `heterogeneous`, `asynchronous`.
"""
