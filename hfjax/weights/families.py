"""The families of models that can be read and written: a row each.

`config` reads config.json, `model` is what runs it, `table` says which tensor lies where.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hfjax.base.tables import named
from hfjax.models.gpt import GPT
from hfjax.models.llama import Llama
from hfjax.models.moe.moe_llama import MoELlama
from hfjax.weights import config_keys as keys
from hfjax.weights.decoder_rules import OF_MIXTRAL, OF_QWEN, decoder_table, gpt_table
from hfjax.weights.name_rules import Table


@dataclass(frozen=True)
class Family:
    """How models of a family are read.

    Attributes:
        config: Function of config.json's object: the shape of the model in hfjax's words.
        model: The module, a function of that shape and of `rngs`.
        table: Function of that shape: which tensor lies where.
    """

    config: Callable[[Mapping[str, Any]], Any]
    model: Callable[..., Any]
    table: Callable[[Any], Table]


