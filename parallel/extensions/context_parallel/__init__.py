"""Context parallelism: sequences are sharded over devices, and attention runs across them.

Two choices: the communication (`comm_kinds`: a ring, an all-gather, Ulysses, or Ulysses within
rings), and which device has which positions (`sequence_layout`: zigzag or contiguous). `ops` are
the model's ops, which choose by the attentions that it calls (`attention_calls`); `ring_attention`
loops over blocks of keys (`ring_block`), `ulysses` exchanges heads.
"""
