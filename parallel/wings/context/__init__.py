"""Context parallelism: a row of the batch lies on several devices, and attention joins its parts.

Two choices (`forms`): what travels (a ring, an all-gather, Ulysses, or Ulysses within rings), and
who holds which positions (`deal`: zigzag or contiguous). `on_shared_rows` is what modules are
handed; `ring_attention` visits blocks of keys (`visits`), `ulysses` exchanges heads.
"""
