"""Flax NNX modules in three parts (embed, layers, head). They name their axes and know no mesh."""
