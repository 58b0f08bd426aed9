"""Checkpoints: Orbax directories with a manifest, restored under any strategy."""
