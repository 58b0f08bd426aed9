"""Context parallelism: a row of the batch lies on several devices, and attention joins its parts.

Two choices: what travels (the form: `ring`, `allgather`, `ulysses`, or Ulysses within rings), and
who holds which positions (the order: `zigzag`, `contiguous`).
"""
