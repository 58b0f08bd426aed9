"""Base classes of all model configurations: presets, and the padded vocabulary."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self


class Presets:
    """A configuration with presets."""

    known: ClassVar[Mapping[str, Any]] = {}  # the presets

    @classmethod
    def preset(cls, name: str, **changes) -> Self:
        """Return a preset, with some fields changed.

        Args:
            name: One of the PRESETS of the model's file.
            changes: Fields by name.

        Example:
            >>> from hfjax.models.llama import LlamaConfig
            >>> LlamaConfig.preset("llama3-8b", layers=16).kv_heads
            8
        """
        if name not in cls.known:
            model = cls.__name__.removesuffix("Config")
            raise ValueError(f"{model} preset {name!r}: one of {', '.join(cls.known)}.")
        return replace(cls.known[name], **changes)


class TextPresets(Presets):
    """The configuration of a language model, whose first preset is tiny."""

    vocab: int
    pad_vocab_to: int

    @property
    def padded_vocab(self) -> int:
        """The number of rows of the embedding, padding included."""
        return -(-self.vocab // self.pad_vocab_to) * self.pad_vocab_to

    @classmethod
    def tiny(cls, **changes) -> Self:
        """Return the configuration of a byte-level model that trains on a laptop.

        Args:
            changes: Fields by name.

        Example:
            >>> from hfjax.models.gpt import GPTConfig
            >>> GPTConfig.tiny(layers=2).layers
            2
        """
        return cls.preset(next(iter(cls.known)), **changes)
