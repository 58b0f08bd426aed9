"""Context parallelism: a sequence lies on several devices, and attention joins its parts.

Two choices (`comm_kinds`): what travels (a ring, an all-gather, Ulysses, or Ulysses within rings),
and who holds which positions (`sequence_layout`: zigzag or contiguous). `ops` is what modules are
handed; `ring_attention` goes over blocks of keys (`ring_block`), `ulysses` exchanges heads.
"""
