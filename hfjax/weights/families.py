"""The families of models that can be read and written: a row each.

`config_keys` reads the shape of a model; here is what runs it, and which tensor lies where.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hfjax.models.gpt import GPT
from hfjax.models.llama import Llama
from hfjax.models.moe.moe_llama import MoELlama
from hfjax.weights.decoder_rules import OF_MIXTRAL, OF_QWEN, decoder_table, gpt_table
from hfjax.weights.name_rules import RuleTable


@dataclass(frozen=True)
class Family:
    """How models of a family are run and read.

    Attributes:
        model: The module, a function of the shape of the model and of `rngs`.
        table: Function of that shape: which tensor lies where.
    """

    model: Callable[..., Any]
    table: Callable[[Any], RuleTable]


_LLAMA = Family(Llama, decoder_table)
FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(GPT, gpt_table),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"), _LLAMA),
    "gemma3": _LLAMA,
    "mixtral": Family(MoELlama, partial(decoder_table, experts=OF_MIXTRAL)),
    "qwen3_moe": Family(MoELlama, partial(decoder_table, experts=OF_QWEN)),
}
