"""Convert the keys of a config.json to the configuration of a model.

Absent keys have the defaults of `transformers`. Old and new spellings are both read:
`rope_parameters`, and before it `rope_scaling` and `rope_theta`; `num_experts` and
`num_local_experts`; `layer_types` and `sliding_window_pattern`. Dropout is left out: it is a
training setting.
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

ModelConfig = GPTConfig | LlamaConfig | MoEConfig

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
UNSUPPORTED_ROPES = {
    "dynamic": "its speeds depend on the longest row so far",
    "longrope": "its speeds depend on the longest row so far",
    "proportional": "it turns a part of each head",
    "mrope": "its positions are those of pictures",
}


# -- families ------------------------------------------------------------------------------------


def gpt2_config(cfg: ConfigValues) -> GPTConfig:
    """Return the configuration of a GPT-2."""
    embed = cfg.get_int("n_embd")
    cfg.require("n_inner", 4 * embed, "an MLP is four times as wide as the residual stream:")
    cfg.get_choice("activation_function", GELU_TANH, "gelu_new")
    cfg.require("layer_norm_epsilon", 1e-5, "GPT's norms have one epsilon:")
    cfg.require("scale_attn_weights", True, "scores of attention are scaled:")
    cfg.require("scale_attn_by_inverse_layer_idx", False, "scores are scaled alike in all layers:")
    cfg.require("add_cross_attention", False, "the model is a decoder by itself:")
    cfg.require("tie_word_embeddings", True, "GPT's head is its embedding:")
    return GPTConfig(
        vocab=cfg.get_int("vocab_size"),
        length=cfg.get_int("n_positions"),
        layers=cfg.get_int("n_layer"),
        heads=cfg.get_int("n_head"),
        embed=embed,
    )


def _decoder_fields(cfg: ConfigValues) -> dict[str, Any]:
    """Return the fields that all families but GPT-2 share."""
    for name in ("attention_bias", "mlp_bias"):
        if cfg.get_bool(name):
            cfg.refuse(name, "only queries, keys and values of qwen2 have biases; take false.")
    embed, heads = cfg.get_int("hidden_size"), cfg.get_int("num_attention_heads")
    head = cfg.maybe_int("head_dim")
    return {
        "vocab": cfg.get_int("vocab_size"),
        "length": cfg.get_int("max_position_embeddings"),
        "layers": cfg.get_int("num_hidden_layers"),
        "heads": heads,
        "kv_heads": cfg.maybe_int("num_key_value_heads") or heads,
        "embed": embed,
        "mlp": cfg.get_int("intermediate_size"),
        "head": None if head is None or head * heads == embed else head,
        "epsilon": cfg.get_float("rms_norm_eps"),
        "tied": cfg.get_bool("tie_word_embeddings"),
    }


def _activation(cfg: ConfigValues, name: str = "hidden_act") -> dict[str, Any]:
    return {"activation": cfg.get_choice(name, ACTIVATIONS)}


def llama_config(cfg: ConfigValues) -> LlamaConfig:
    """Return the configuration of a Llama 2 or 3."""
    return LlamaConfig(**_decoder_fields(cfg), **_activation(cfg), rotary=_rotary(cfg))


def mistral_config(cfg: ConfigValues) -> LlamaConfig:
    """Return the configuration of a Mistral."""
    return LlamaConfig(
        **_decoder_fields(cfg),
        **_activation(cfg),
        **_uniform_layers(cfg, cfg.maybe_int("sliding_window")),
    )


def qwen2_config(cfg: ConfigValues) -> LlamaConfig:
    """Return the configuration of a Qwen2."""
    return LlamaConfig(
        **_decoder_fields(cfg), **_activation(cfg), **_qwen_layers(cfg), qkv_bias=True
    )


def qwen3_config(cfg: ConfigValues) -> LlamaConfig:
    """Return the configuration of a Qwen3."""
    return LlamaConfig(
        **_decoder_fields(cfg), **_activation(cfg), **_qwen_layers(cfg), qk_norm=True
    )


def _qwen_layers(cfg: ConfigValues) -> dict[str, Any]:
    """Return the layer fields; the last layers may use a sliding window."""
    window, first = _qwen_window(cfg), cfg.get_int("max_window_layers", minimum=0)
    layer_kind = lambda i: SLIDING if window and i >= first else FULL
    rotary = _rotary(cfg)
    return _layer_fields(cfg, layer_kind, window, {FULL: rotary, SLIDING: rotary})


def _qwen_window(cfg: ConfigValues) -> int | None:
    return cfg.maybe_int("sliding_window") if cfg.get_bool("use_sliding_window") else None


def gemma2_config(cfg: ConfigValues) -> LlamaConfig:
    """Return the configuration of a Gemma 2."""
    rotary = _rotary(cfg)
    layer_kind = lambda i: SLIDING if (i + 1) % 2 else FULL
    return LlamaConfig(**_gemma_fields(cfg, layer_kind, {FULL: rotary, SLIDING: rotary}))


def gemma3_text_config(cfg: ConfigValues) -> LlamaConfig:
    """Return the configuration of a Gemma 3."""
    cfg.require("attn_logit_softcapping", None, "transformers' Gemma 3 leaves this cap out:")
    pattern = cfg.get_int("sliding_window_pattern")
    layer_kind = lambda i: SLIDING if (i + 1) % pattern else FULL
    return LlamaConfig(**_gemma_fields(cfg, layer_kind, _gemma3_rotary(cfg)), qk_norm=True)


def gemma3_config(cfg: ConfigValues) -> LlamaConfig:
    """Return the configuration of the text model of a multimodal Gemma 3."""
    text = cfg.get_section("text_config")
    if text is None:
        cfg.refuse("text_config", "the keys of the part that reads text are expected there.")
    return gemma3_text_config(text.with_defaults(GEMMA3))


def _gemma_fields(
    cfg: ConfigValues, layer_kind: Callable, rotary: Mapping[str, Rope]
) -> dict[str, Any]:
    """Return the fields that Gemma 2 and 3 share."""
    if cfg.get_bool("use_bidirectional_attention"):
        cfg.refuse("use_bidirectional_attention", "attention is causal: take false.")
    fields, scalar = _decoder_fields(cfg), cfg.get_float("query_pre_attn_scalar")
    width = fields["head"] or fields["embed"] // fields["heads"]
    window, cap = cfg.maybe_int("sliding_window"), cfg.maybe_float("attn_logit_softcapping")
    return {
        **fields,
        **_activation(cfg, "hidden_activation"),
        **_layer_fields(cfg, layer_kind, window, rotary, cap),
        "norms_after": True,
        "norm_plus_one": True,
        "embedding_scale": fields["embed"] ** 0.5,
        "query_scale": None if scalar == width else scalar**-0.5,
        "logit_cap": cfg.maybe_float("final_logit_softcapping"),
    }


def mixtral_config(cfg: ConfigValues) -> MoEConfig:
    """Return the configuration of a Mixtral."""
    if cfg.keys.get("router_jitter_noise"):
        cfg.refuse("router_jitter_noise", "take 0; Router(noise=) has noise of training.")
    window = cfg.maybe_int("sliding_window")
    return MoEConfig(**_moe_fields(cfg, window, normalised=True), experts=_num_experts(cfg, 8))


def qwen3_moe_config(cfg: ConfigValues) -> MoEConfig:
    """Return the configuration of a Qwen3-MoE."""
    fields = _moe_fields(cfg, _qwen_window(cfg), cfg.get_bool("norm_topk_prob"))
    dense, layers = fields.pop("mlp"), fields["layers"]
    sparse_step, dense_layers = (
        cfg.get_int("decoder_sparse_step"),
        cfg.get_indices("mlp_only_layers", layers),
    )
    experts = _num_experts(cfg, 128)
    counts = tuple(
        0 if i in dense_layers or (i + 1) % sparse_step else experts for i in range(layers)
    )
    is_uniform = all(counts)
    return MoEConfig(
        **fields,
        mlp=cfg.get_int("moe_intermediate_size"),
        qk_norm=True,
        experts=experts if is_uniform else counts,
        dense=None if is_uniform else dense,
    )


def _moe_fields(cfg: ConfigValues, window: int | None, normalised: bool) -> dict[str, Any]:
    """Return the fields that MoE models share.

    There is a load-balancing loss if `transformers` adds one.
    """
    cfg.get_choice("hidden_act", SILU, "silu")
    normalise, top_k = "chosen" if normalised else "none", cfg.get_int("num_experts_per_tok")
    router = Router(normalise=normalise, balance_loss=0)
    if cfg.get_bool("output_router_logits"):  # pooled over layers, and each choice counts as one
        loss = top_k * cfg.get_float("router_aux_loss_coef", minimum=0)
        router = replace(router, balance_loss=loss, balance_over="batch", pools_layers=True)
    return {
        **_decoder_fields(cfg),
        **_uniform_layers(cfg, window),
        "top_k": top_k,
        "capacity": None,
        "router": router,
    }


def _num_experts(cfg: ConfigValues, default: int) -> int:
    """Return the number of experts, from either of its keys."""
    names = [name for name in ("num_experts", "num_local_experts") if name in cfg]
    count = cfg.get_int(names[0]) if names else default
    if cfg.get_int("num_experts_per_tok") > count:
        cfg.refuse("num_experts_per_tok", f"at most the number of experts, {count}, is expected.")
    return count


# -- layers of two kinds ---------------------------------------------------------------------------


def _uniform_layers(cfg: ConfigValues, window: int | None) -> dict[str, Any]:
    """Return the layer fields if all layers are alike."""
    kind = FULL if window is None else SLIDING
    kinds = cfg.get_choices("layer_types", (FULL, SLIDING), cfg.get_int("num_hidden_layers"))
    if kinds is not None and set(kinds) != {kind}:
        cfg.refuse("layer_types", f"all layers of this family are alike: {kind}.")
    return {"rotary": _rotary(cfg), "attention": _attention(None, window)}


def _layer_fields(
    cfg: ConfigValues,
    layer_kind: Callable[[int], str],
    window: int | None,
    rotary: Mapping[str, Rope],
    cap: float | None = None,
) -> dict[str, Any]:
    """Return the attention fields of layers, some of which may use a sliding window.

    `layer_kind` gives the kind of each layer if `layer_types` is absent.
    """
    count = cfg.get_int("num_hidden_layers")
    kinds = cfg.get_choices("layer_types", (FULL, SLIDING), count) or list(
        map(layer_kind, range(count))
    )
    sliding = tuple(i for i, kind in enumerate(kinds) if kind == SLIDING)
    if sliding and window is None:
        cfg.refuse("layer_types", "layers see a window, and sliding_window gives none.")
    attention = {FULL: _attention(cap, None), SLIDING: _attention(cap, window)}
    if len(sliding) in (0, count):
        return {"attention": attention[kinds[0]], "rotary": rotary[kinds[0]]}
    local_rotary = None if rotary[SLIDING] == rotary[FULL] else rotary[SLIDING]
    local = LocalLayers(sliding, attention[SLIDING], local_rotary)
    return {"attention": attention[FULL], "rotary": rotary[FULL], "local": local}


def _attention(cap: float | None, window: int | None) -> Callable:
    if cap is not None:
        return capped(cap, window)
    return causal_attention if window is None else windowed(window)


# -- rotary positions ------------------------------------------------------------------------------


def _rotary(cfg: ConfigValues) -> Rope:
    """Return the RoPE of all layers; both spellings are read."""
    rope_cfg = cfg.get_section("rope_scaling") or cfg.get_section("rope_parameters") or cfg.empty
    for kind in (FULL, SLIDING):
        if kind in rope_cfg:
            rope_cfg.refuse(kind, "layers of this family share one set of rotary positions.")
    return _rope(cfg, rope_cfg, cfg.get_float("rope_theta"))


def _gemma3_rotary(cfg: ConfigValues) -> dict[str, Rope]:
    """Return the RoPE of each kind of layer."""
    bases = {FULL: cfg.get_float("rope_theta"), SLIDING: cfg.get_float("rope_local_base_freq")}
    rope_cfg = cfg.get_section("rope_parameters") or cfg.empty
    if flat := rope_cfg.keys.keys() - bases.keys():
        rope_cfg.refuse(min(flat), f"its keys are {FULL} and {SLIDING}, each with its own.")
    by_kind = {kind: rope_cfg.get_section(kind) or cfg.empty for kind in bases}
    if scaling := cfg.get_section("rope_scaling"):  # for global attention layers
        by_kind[FULL] = scaling.with_defaults(by_kind[FULL].keys)
    return {kind: _rope(cfg, by_kind[kind], bases[kind]) for kind in bases}


def _rope(cfg: ConfigValues, rope_cfg: ConfigValues, base: float) -> Rope:
    """Return the RoPE that a set of keys describes."""
    kind = _rope_type(cfg, rope_cfg)
    base = rope_cfg.get_float("rope_theta", base)
    if kind == "default":
        return Rope(base)
    if kind == "linear":
        return Rope(base, kind, factor=rope_cfg.get_float("factor", minimum=1))
    source = cfg if "original_max_position_embeddings" in cfg else rope_cfg
    length = cfg.get_int("max_position_embeddings")
    original = source.get_int("original_max_position_embeddings", length)
    if kind == "llama3":
        low, high = rope_cfg.get_float("low_freq_factor"), rope_cfg.get_float("high_freq_factor")
        factor = rope_cfg.get_float("factor", minimum=1)
        return Rope(base, kind, factor=factor, original=original, low=low, high=high)
    return _yarn(rope_cfg, base, original, length)


def _rope_type(cfg: ConfigValues, rope_cfg: ConfigValues) -> str:
    name = "rope_type" if "rope_type" in rope_cfg else "type"
    rope_type = rope_cfg.keys.get(name)
    unsupported = "mrope" if "mrope_section" in rope_cfg else rope_type
    if isinstance(unsupported, str) and unsupported in UNSUPPORTED_ROPES:
        rope_cfg.refuse(
            name if rope_type == unsupported else "mrope_section", _unsupported_rope(unsupported)
        )
    for values in (cfg, rope_cfg):
        values.require("partial_rotary_factor", 1.0, "all dimensions of a head are turned:")
    return rope_cfg.get_choice(name, ROPE_TYPES, "default")


def _unsupported_rope(kind: str) -> str:
    known = ", ".join(ROPE_TYPES)
    reason = UNSUPPORTED_ROPES[kind]
    return f"rotary positions of the kind {kind} are not read ({reason}); {known} are."


def _yarn(rope_cfg: ConfigValues, base: float, original: int, length: int) -> Rope:
    factor = rope_cfg.maybe_float("factor")
    factor = length / original if factor is None else factor
    rope = partial(Rope, base, "yarn", factor=factor, original=original)
    attention = rope_cfg.maybe_float("attention_factor")
    if attention is None and "mscale" in rope_cfg and "mscale_all_dim" in rope_cfg:
        mscales = (rope_cfg.get_float(name) for name in ("mscale", "mscale_all_dim"))
        scales = [1 + mscale * (rope().attention_scaling - 1) for mscale in mscales]
        attention = scales[0] / scales[1]
    return rope(
        fast=rope_cfg.maybe_float("beta_fast") or 32.0,
        slow=rope_cfg.maybe_float("beta_slow") or 1.0,
        attention=attention,
        truncate=rope_cfg.get_bool("truncate", default=True),
    )


# -- defaults --------------------------------------------------------------------------------------

# Values of absent keys, as in the configuration classes of transformers.
_COMMON = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "sliding_window": 4096,
}
LLAMA = {
    **_COMMON,
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
    **_COMMON,
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
    **_COMMON,
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
