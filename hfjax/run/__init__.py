"""A training run: configuration, loop, metrics, evaluation, text."""
