"""The loss of a vocabulary without its logits (`loss`), and its kernels."""
