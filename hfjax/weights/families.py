"""The table of model families that can be read and written.

`config_keys` has the functions that read config.json, `decoder_rules` those that return the tensor
rules; keys absent from a config.json have the defaults of `transformers`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from hfjax.models.gpt import GPT
from hfjax.models.llama import Llama
from hfjax.models.moe.moe_llama import MoELlama
from hfjax.weights import config_keys as keys
from hfjax.weights.config_values import ConfigValues
from hfjax.weights.decoder_rules import MIXTRAL_EXPERTS, QWEN_EXPERTS, decoder_table, gpt_table
from hfjax.weights.tensor_files import KNOWN_TYPES
from hfjax.weights.tensor_rules import RuleTable


class Family(NamedTuple):
    """How to read and build models of a family.

    Attributes:
        to_config: Function of config.json's values that returns the model's configuration.
        defaults: The values of keys that a config.json may omit.
        model: The module class, called with the configuration and `rngs`.
        table: Function of the configuration that returns the tensor rules.
    """

    to_config: Callable[[ConfigValues], keys.ModelConfig]
    defaults: Mapping[str, Any]
    model: Callable[..., Any]
    table: Callable[[Any], RuleTable]


_mixtral = partial(decoder_table, experts=MIXTRAL_EXPERTS)
_qwen3_moe = partial(decoder_table, experts=QWEN_EXPERTS)
FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(keys.gpt2_config, keys.GPT2, GPT, gpt_table),
    "llama": Family(keys.llama_config, keys.LLAMA, Llama, decoder_table),
    "mistral": Family(keys.mistral_config, keys.MISTRAL, Llama, decoder_table),
    "qwen2": Family(keys.qwen2_config, keys.QWEN2, Llama, decoder_table),
    "qwen3": Family(keys.qwen3_config, keys.QWEN3, Llama, decoder_table),
    "gemma2": Family(keys.gemma2_config, keys.GEMMA2, Llama, decoder_table),
    "gemma3_text": Family(keys.gemma3_text_config, keys.GEMMA3, Llama, decoder_table),
    "gemma3": Family(keys.gemma3_config, {}, Llama, decoder_table),
    "mixtral": Family(keys.mixtral_config, keys.MIXTRAL, MoELlama, _mixtral),
    "qwen3_moe": Family(keys.qwen3_moe_config, keys.QWEN3_MOE, MoELlama, _qwen3_moe),
}
_LATENT = (
    "its attention has latent keys and values, and turns neighbouring dimensions, which no model "
    "here does."
)
REFUSED = dict.fromkeys(("deepseek_v2", "deepseek_v3"), _LATENT)


def parse_config(config: Mapping[str, Any]) -> keys.ModelConfig:
    """Return the model configuration that a config.json describes.

    Args:
        config: The content of the file.

    Example:
        >>> from hfjax.weights.families import parse_config
        >>> parse_config({"model_type": "qwen3", "num_key_value_heads": 8}).qk_norm
        True
    """
    values, family = ConfigValues(config), config.get("model_type")
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
    entry = FAMILIES[family]
    return entry.to_config(values.with_defaults(entry.defaults))
