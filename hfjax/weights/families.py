"""The families of models that can be read and written: a row each.

`config_keys` has the functions that read config.json, `decoder_rules` those that say which tensor
lies where; what is left out of a config.json is as `transformers` has it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from hfjax.models.gpt import GPT
from hfjax.models.llama import Llama
from hfjax.models.moe.moe_llama import MoELlama
from hfjax.weights import config_keys as keys
from hfjax.weights.config_values import ConfigValues
from hfjax.weights.decoder_rules import OF_MIXTRAL, OF_QWEN, decoder_table, gpt_table
from hfjax.weights.tensor_files import KNOWN_TYPES
from hfjax.weights.tensor_rules import RuleTable


class Family(NamedTuple):
    """How models of a family are read and run.

    Attributes:
        shape: Function of config.json's values: the shape of the model in hfjax's words.
        defaults: The values that a config.json may leave out.
        model: The module, a function of the shape and of `rngs`.
        table: Function of the shape: which tensor lies where.
    """

    shape: Callable[[ConfigValues], keys.Shape]
    defaults: Mapping[str, Any]
    model: Callable[..., Any]
    table: Callable[[Any], RuleTable]


_mixtral = partial(decoder_table, experts=OF_MIXTRAL)
_qwen3_moe = partial(decoder_table, experts=OF_QWEN)
FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(keys.gpt2_shape, keys.GPT2, GPT, gpt_table),
    "llama": Family(keys.llama_shape, keys.LLAMA, Llama, decoder_table),
    "mistral": Family(keys.mistral_shape, keys.MISTRAL, Llama, decoder_table),
    "qwen2": Family(keys.qwen2_shape, keys.QWEN2, Llama, decoder_table),
    "qwen3": Family(keys.qwen3_shape, keys.QWEN3, Llama, decoder_table),
    "gemma2": Family(keys.gemma2_shape, keys.GEMMA2, Llama, decoder_table),
    "gemma3_text": Family(keys.gemma3_text_shape, keys.GEMMA3, Llama, decoder_table),
    "gemma3": Family(keys.gemma3_shape, {}, Llama, decoder_table),
    "mixtral": Family(keys.mixtral_shape, keys.MIXTRAL, MoELlama, _mixtral),
    "qwen3_moe": Family(keys.qwen3_moe_shape, keys.QWEN3_MOE, MoELlama, _qwen3_moe),
}
_LATENT = (
    "its attention has latent keys and values, and turns neighbouring dimensions, which no model "
    "here does."
)
REFUSED = dict.fromkeys(("deepseek_v2", "deepseek_v3"), _LATENT)


def config_of(given: Mapping[str, Any]) -> keys.Shape:
    """Return the shape of the model that a config.json describes.

    Args:
        given: What the file holds.

    Example:
        >>> from hfjax.weights.families import config_of
        >>> config_of({"model_type": "qwen3", "num_key_value_heads": 8}).qk_norm
        True
    """
    values, family = ConfigValues(given), given.get("model_type")
    if isinstance(family, str) and family in REFUSED:
        values.refuse("model_type", REFUSED[family])
    if not isinstance(family, str) or family not in FAMILIES:
        values.refuse("model_type", f"one of {', '.join(FAMILIES)} is expected.")
    if "quantization_config" in values:
        values.refuse(
            "quantization_config",
            f"weights are read in {', '.join(KNOWN_TYPES)} alone. Take the files of the model "
            "before it was quantized.",
        )
    row = FAMILIES[family]
    return row.shape(values.with_defaults(row.defaults))
