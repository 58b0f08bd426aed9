"""The shape of a pretrained model, by the keys of its config.json.

Keys that are absent are as `transformers` has them. Both spellings of what has changed in it are
read: `rope_parameters`, and before it `rope_scaling` and `rope_theta`; `num_experts` and
`num_local_experts`; `layer_types` and `sliding_window_pattern`. Dropout is left out: it is a
setting of training.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from hfjax.models.attention import capped, causal_attention, windowed
from hfjax.models.gpt import GPTConfig
from hfjax.models.llama import LlamaConfig, LocalLayers
from hfjax.models.moe.moe_llama import MoEConfig
from hfjax.models.moe.router import Router
from hfjax.models.rope import Rope
from hfjax.weights.config_values import ConfigValues

Shape = GPTConfig | LlamaConfig | MoEConfig

FULL, SLIDING = "full_attention", "sliding_attention"
SILU: Mapping[str, str] = dict.fromkeys(("silu", "swish"), "silu")
GELU_TANH: Mapping[str, str] = (
    dict.fromkeys(  # one function under the names that transformers has for it
        ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_accurate"),
        "gelu_tanh",
    )
)
ACTIVATIONS: Mapping[str, str] = {**SILU, **GELU_TANH}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
LATER_ROPES = {
    "dynamic": "its speeds depend on the longest row so far",
    "longrope": "its speeds depend on the longest row so far",
    "proportional": "it turns a part of each head",
    "mrope": "its positions are those of pictures",
}


# -- families ------------------------------------------------------------------------------------


def gpt2_shape(of: ConfigValues) -> GPTConfig:
    """Return the shape of a GPT-2."""
    embed = of.whole("n_embd")
    of.only("n_inner", 4 * embed, "an MLP is four times as wide as the residual stream:")
    of.word("activation_function", GELU_TANH, "gelu_new")
    of.only("layer_norm_epsilon", 1e-5, "GPT's norms have one epsilon:")
    of.only("scale_attn_weights", True, "scores of attention are scaled:")
    of.only("scale_attn_by_inverse_layer_idx", False, "scores are scaled alike in all layers:")
    of.only("add_cross_attention", False, "the model is a decoder by itself:")
    of.only("tie_word_embeddings", True, "GPT's head is its embedding:")
    return GPTConfig(
        vocab=of.whole("vocab_size"),
        length=of.whole("n_positions"),
        layers=of.whole("n_layer"),
        heads=of.whole("n_head"),
        embed=embed,
    )


def _decoder(of: ConfigValues) -> dict[str, Any]:
    """Return the fields that all but GPT-2 read alike."""
    for name in ("attention_bias", "mlp_bias"):
        if of.flag(name):
            of.refuse(name, "only queries, keys and values of qwen2 have biases; take false.")
    embed, heads = of.whole("hidden_size"), of.whole("num_attention_heads")
    head = of.maybe_whole("head_dim")
    return {
        "vocab": of.whole("vocab_size"),
        "length": of.whole("max_position_embeddings"),
        "layers": of.whole("num_hidden_layers"),
        "heads": heads,
        "kv_heads": of.maybe_whole("num_key_value_heads") or heads,
        "embed": embed,
        "mlp": of.whole("intermediate_size"),
        "head": None if head is None or head * heads == embed else head,
        "epsilon": of.number("rms_norm_eps"),
        "tied": of.flag("tie_word_embeddings"),
    }


def _activation(of: ConfigValues, name: str = "hidden_act") -> dict[str, Any]:
    return {"activation": of.word(name, ACTIVATIONS)}


def llama_shape(of: ConfigValues) -> LlamaConfig:
    """Return the shape of a Llama 2 or 3."""
    return LlamaConfig(**_decoder(of), **_activation(of), rotary=_rotary(of))


def mistral_shape(of: ConfigValues) -> LlamaConfig:
    """Return the shape of a Mistral."""
    return LlamaConfig(
        **_decoder(of), **_activation(of), **_one_kind(of, of.maybe_whole("sliding_window"))
    )


def qwen2_shape(of: ConfigValues) -> LlamaConfig:
    """Return the shape of a Qwen2."""
    return LlamaConfig(**_decoder(of), **_activation(of), **_qwen_layers(of), qkv_bias=True)


def qwen3_shape(of: ConfigValues) -> LlamaConfig:
    """Return the shape of a Qwen3."""
    return LlamaConfig(**_decoder(of), **_activation(of), **_qwen_layers(of), qk_norm=True)


def _qwen_layers(of: ConfigValues) -> dict[str, Any]:
    """Return the fields of layers, of which the last may see a window."""
    window, first = _qwen_window(of), of.whole("max_window_layers", least=0)
    sees = lambda i: SLIDING if window and i >= first else FULL
    rotary = _rotary(of)
    return _layers(of, sees, window, {FULL: rotary, SLIDING: rotary})


def _qwen_window(of: ConfigValues) -> int | None:
    return of.maybe_whole("sliding_window") if of.flag("use_sliding_window") else None


def gemma2_shape(of: ConfigValues) -> LlamaConfig:
    """Return the shape of a Gemma 2."""
    rotary = _rotary(of)
    sees = lambda i: SLIDING if (i + 1) % 2 else FULL
    return LlamaConfig(**_of_gemma(of, sees, {FULL: rotary, SLIDING: rotary}))


def gemma3_text_shape(of: ConfigValues) -> LlamaConfig:
    """Return the shape of a Gemma 3."""
    of.only("attn_logit_softcapping", None, "transformers' Gemma 3 leaves this cap out:")
    every = of.whole("sliding_window_pattern")
    sees = lambda i: SLIDING if (i + 1) % every else FULL
    return LlamaConfig(**_of_gemma(of, sees, _gemma3_rotary(of)), qk_norm=True)


def gemma3_shape(of: ConfigValues) -> LlamaConfig:
    """Return the shape of the part that reads text."""
    text = of.part("text_config")
    if text is None:
        of.refuse("text_config", "the keys of the part that reads text are expected there.")
    return gemma3_text_shape(text.with_defaults(GEMMA3))


def _of_gemma(of: ConfigValues, sees: Callable, rotary: Mapping[str, Rope]) -> dict[str, Any]:
    """Return the fields that Gemma 2 and 3 read alike."""
    if of.flag("use_bidirectional_attention"):
        of.refuse("use_bidirectional_attention", "attention is causal: take false.")
    known, scalar = _decoder(of), of.number("query_pre_attn_scalar")
    width = known["head"] or known["embed"] // known["heads"]
    window, cap = of.maybe_whole("sliding_window"), of.maybe_number("attn_logit_softcapping")
    return {
        **known,
        **_activation(of, "hidden_activation"),
        **_layers(of, sees, window, rotary, cap),
        "norms_after": True,
        "norm_plus_one": True,
        "embedding_scale": known["embed"] ** 0.5,
        "query_scale": None if scalar == width else scalar**-0.5,
        "logit_cap": of.maybe_number("final_logit_softcapping"),
    }


def mixtral_shape(of: ConfigValues) -> MoEConfig:
    """Return the shape of a Mixtral."""
    if of.keys.get("router_jitter_noise"):
        of.refuse("router_jitter_noise", "take 0; Router(noise=) has noise of training.")
    window = of.maybe_whole("sliding_window")
    return MoEConfig(**_mixture(of, window, normalised=True), experts=_experts(of, 8))


def qwen3_moe_shape(of: ConfigValues) -> MoEConfig:
    """Return the shape of a Qwen3 with experts."""
    known = _mixture(of, _qwen_window(of), of.flag("norm_topk_prob"))
    dense, layers = known.pop("mlp"), known["layers"]
    every, plain = of.whole("decoder_sparse_step"), of.numbers_below("mlp_only_layers", layers)
    experts = _experts(of, 128)
    counts = tuple(0 if i in plain or (i + 1) % every else experts for i in range(layers))
    alike = all(counts)
    return MoEConfig(
        **known,
        mlp=of.whole("moe_intermediate_size"),
        qk_norm=True,
        experts=experts if alike else counts,
        dense=None if alike else dense,
    )


def _mixture(of: ConfigValues, window: int | None, normalised: bool) -> dict[str, Any]:
    """Return the fields that models with experts read alike.

    The loss of balance is there if `transformers` adds one.
    """
    of.word("hidden_act", SILU, "silu")
    how, chosen = "chosen" if normalised else "none", of.whole("num_experts_per_tok")
    router = Router(normalise=how, balance_loss=0)
    if of.flag("output_router_logits"):  # of all layers together, and a choice counts as one
        loss = chosen * of.number("router_aux_loss_coef", least=0)
        router = replace(router, balance_loss=loss, balance_over="batch", pools_layers=True)
    return {
        **_decoder(of),
        **_one_kind(of, window),
        "top_k": chosen,
        "capacity": None,
        "router": router,
    }


def _experts(of: ConfigValues, otherwise: int) -> int:
    """Return the number of experts, by either of its names."""
    names = [name for name in ("num_experts", "num_local_experts") if name in of]
    count = of.whole(names[0]) if names else otherwise
    if of.whole("num_experts_per_tok") > count:
        of.refuse("num_experts_per_tok", f"at most the number of experts, {count}, is expected.")
    return count


# -- layers of two kinds ---------------------------------------------------------------------------


def _one_kind(of: ConfigValues, window: int | None) -> dict[str, Any]:
    """Return the fields of layers that are all alike."""
    kind = FULL if window is None else SLIDING
    kinds = of.words("layer_types", (FULL, SLIDING), of.whole("num_hidden_layers"))
    if kinds is not None and set(kinds) != {kind}:
        of.refuse("layer_types", f"all layers of this family are alike: {kind}.")
    return {"rotary": _rotary(of), "attention": _attention(None, window)}


def _layers(
    of: ConfigValues,
    sees: Callable[[int], str],
    window: int | None,
    rotary: Mapping[str, Rope],
    cap: float | None = None,
) -> dict[str, Any]:
    """Return the fields that say how layers attend, of which some may see a window.

    `sees` is the kind of each where `layer_types` does not say it.
    """
    count = of.whole("num_hidden_layers")
    kinds = of.words("layer_types", (FULL, SLIDING), count) or list(map(sees, range(count)))
    some = tuple(i for i, kind in enumerate(kinds) if kind == SLIDING)
    if some and window is None:
        of.refuse("layer_types", "layers see a window, and sliding_window gives none.")
    attention = {FULL: _attention(cap, None), SLIDING: _attention(cap, window)}
    if len(some) in (0, count):
        return {"attention": attention[kinds[0]], "rotary": rotary[kinds[0]]}
    other = None if rotary[SLIDING] == rotary[FULL] else rotary[SLIDING]
    local = LocalLayers(some, attention[SLIDING], other)
    return {"attention": attention[FULL], "rotary": rotary[FULL], "local": local}


def _attention(cap: float | None, window: int | None) -> Callable:
    if cap is not None:
        return capped(cap, window)
    return causal_attention if window is None else windowed(window)


# -- rotary positions ------------------------------------------------------------------------------


def _rotary(of: ConfigValues) -> Rope:
    """Return the rotary positions of all layers; both spellings are read."""
    found = of.part("rope_scaling") or of.part("rope_parameters") or of.nothing
    for kind in (FULL, SLIDING):
        if kind in found:
            found.refuse(kind, "layers of this family share one set of rotary positions.")
    return _rope(of, found, of.number("rope_theta"))


def _gemma3_rotary(of: ConfigValues) -> dict[str, Rope]:
    """Return the rotary positions of each kind of layer."""
    bases = {FULL: of.number("rope_theta"), SLIDING: of.number("rope_local_base_freq")}
    given = of.part("rope_parameters") or of.nothing
    if flat := given.keys.keys() - bases.keys():
        given.refuse(min(flat), f"its keys are {FULL} and {SLIDING}, each with its own.")
    parts = {kind: given.part(kind) or of.nothing for kind in bases}
    if scaling := of.part("rope_scaling"):  # of the layers that see all
        parts[FULL] = scaling.with_defaults(parts[FULL].keys)
    return {kind: _rope(of, parts[kind], bases[kind]) for kind in bases}


def _rope(of: ConfigValues, found: ConfigValues, base: float) -> Rope:
    """Return the rotary positions that a set of keys describes."""
    kind = _rope_type(of, found)
    base = found.number("rope_theta", base)
    if kind == "default":
        return Rope(base)
    if kind == "linear":
        return Rope(base, kind, factor=found.number("factor", least=1))
    inside = of if "original_max_position_embeddings" in of else found
    length = of.whole("max_position_embeddings")
    original = inside.whole("original_max_position_embeddings", length)
    if kind == "llama3":
        low, high = found.number("low_freq_factor"), found.number("high_freq_factor")
        factor = found.number("factor", least=1)
        return Rope(base, kind, factor=factor, original=original, low=low, high=high)
    return _yarn(found, base, original, length)


def _rope_type(of: ConfigValues, found: ConfigValues) -> str:
    name = "rope_type" if "rope_type" in found else "type"
    given = found.keys.get(name)
    later = "mrope" if "mrope_section" in found else given
    if isinstance(later, str) and later in LATER_ROPES:
        found.refuse(name if given == later else "mrope_section", _not_read(later))
    for values in (of, found):
        values.only("partial_rotary_factor", 1.0, "all dimensions of a head are turned:")
    return found.word(name, ROPE_TYPES, "default")


def _not_read(kind: str) -> str:
    known = ", ".join(ROPE_TYPES)
    return f"rotary positions of the kind {kind} are not read ({LATER_ROPES[kind]}); {known} are."


def _yarn(found: ConfigValues, base: float, original: int, length: int) -> Rope:
    factor = found.maybe_number("factor")
    factor = length / original if factor is None else factor
    rope = partial(Rope, base, "yarn", factor=factor, original=original)
    attention = found.maybe_number("attention_factor")
    if attention is None and "mscale" in found and "mscale_all_dim" in found:
        shares = (found.number(name) for name in ("mscale", "mscale_all_dim"))
        grown = [1 + share * (rope().grows - 1) for share in shares]
        attention = grown[0] / grown[1]
    return rope(
        fast=found.maybe_number("beta_fast") or 32.0,
        slow=found.maybe_number("beta_slow") or 1.0,
        attention=attention,
        truncate=found.flag("truncate", otherwise=True),
    )


# -- defaults --------------------------------------------------------------------------------------

# Of keys that a file does not have: as in the classes of transformers' configurations.
_OF_ALL = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "sliding_window": 4096,
}
LLAMA = {
    **_OF_ALL,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
}
MISTRAL = {
    **LLAMA,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096 * 32,
}
MIXTRAL = {
    **MISTRAL,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
}
QWEN2 = {
    **_OF_ALL,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
}
QWEN3_MOE = {
    **QWEN2,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "router_aux_loss_coef": 0.001,
}
GEMMA2 = {
    **_OF_ALL,
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3 = {
    **GEMMA2,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
GPT2 = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
QWEN3 = {**QWEN2, "head_dim": 128}
