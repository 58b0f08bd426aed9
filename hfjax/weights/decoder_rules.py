"""The tensor rules of hfjax's decoders: GPT-2, the Llama family, and MoE models.

[V]ocabulary, [D] embed, [H]eads, [G] heads of keys, [Q]ueries of each, head width d, [M]lp.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from hfjax.weights.tensor_rules import Rule, RuleTable, copy_rule, transpose_rule

LAYER = "model.layers.{layer}."
OURS = "layers/"
HEAD = "lm_head.weight"
BUFFERS = ("*.rotary_emb.inv_freq", "*.attn.bias", "*.attn.masked_bias")


class ExpertNames(NamedTuple):
    """A family's names for the tensors of an MoE layer."""

    router: str
    gate: str
    up: str
    down: str


MIXTRAL_EXPERTS = ExpertNames(
    "block_sparse_moe.gate",
    *(f"block_sparse_moe.experts.{{expert}}.{name}" for name in ("w1", "w3", "w2")),
)
QWEN_EXPERTS = ExpertNames(
    "mlp.gate", *(f"mlp.experts.{{expert}}.{name}_proj" for name in ("gate", "up", "down"))
)
NORMS = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2"}
NORMS_AROUND = {  # Gemma: before and after each sublayer
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm1_after",
    "pre_feedforward_layernorm": "norm2",
    "post_feedforward_layernorm": "norm2_after",
}


def gpt_table(c: Any) -> RuleTable:
    """Return the rules of GPT-2; its matrices are [in, out] in the files, too."""
    D, H, d = c.embed, c.heads, c.embed // c.heads
    theirs, ours = "transformer.h.{layer}.", OURS
    rules = [
        Rule("transformer.wte.weight", "tokens", (c.vocab, D), (c.vocab, D), (0, 1), 0, twin=HEAD),
        copy_rule("transformer.wpe.weight", "positions", c.length, D),
        Rule(
            *(f"{theirs}attn.c_attn.weight", f"{ours}attention/qkv/kernel", (D, 3 * D)),
            *((D, 3, H, d), (0, 2, 1, 3)),
            transform="heads first",
        ),
        Rule(
            *(f"{theirs}attn.c_attn.bias", f"{ours}attention/qkv/bias", (3 * D,)),
            *((3, H, d), (1, 0, 2)),
            transform="heads first",
        ),
        Rule(
            *(f"{theirs}attn.c_proj.weight", f"{ours}attention/out/kernel", (D, D)),
            *((H, d, D), (0, 1, 2)),
            transform="heads",
        ),
        copy_rule(f"{theirs}attn.c_proj.bias", f"{ours}attention/out/bias", D),
        copy_rule(f"{theirs}mlp.c_fc.weight", f"{ours}mlp/up/kernel", D, 4 * D),
        copy_rule(f"{theirs}mlp.c_fc.bias", f"{ours}mlp/up/bias", 4 * D),
        copy_rule(f"{theirs}mlp.c_proj.weight", f"{ours}mlp/down/kernel", 4 * D, D),
        copy_rule(f"{theirs}mlp.c_proj.bias", f"{ours}mlp/down/bias", D),
    ]
    for norm, path in (("ln_1", f"{ours}norm1"), ("ln_2", f"{ours}norm2")):
        rules += _norm_rules(f"{theirs}{norm}", path, D)
    rules += _norm_rules("transformer.ln_f", "norm", D)
    return RuleTable(rules, {"layer": c.layers}, "transformer.", BUFFERS)


def _norm_rules(theirs: str, ours: str, width: int) -> list[Rule]:
    names = {"weight": "scale", "bias": "bias"}
    return [copy_rule(f"{theirs}.{a}", f"{ours}/{b}", width) for a, b in names.items()]


def decoder_table(c: Any, experts: ExpertNames | None = None) -> RuleTable:
    """Return the rules of a Llama-like model; an MoE model needs its family's expert names."""
    V, D = c.vocab, c.embed
    tied_name = HEAD if c.tied else None
    rules = [Rule("model.embed_tokens.weight", "tokens", (V, D), (V, D), (0, 1), 0, twin=tied_name)]
    if not c.tied:
        rules += [Rule(HEAD, "unembed/kernel", (V, D), (V, D), (1, 0), 1, transform="transpose")]
    rules += [copy_rule("model.norm.weight", "norm/scale", D)]
    counts = getattr(c, "by_layer", (0,) * c.layers)
    is_mixed = len({*counts}) > 1
    ours = "layers/{layer}/" if is_mixed else OURS
    rules += _attention_rules(c, ours)
    norms = NORMS_AROUND if c.norms_after else NORMS
    rules += [copy_rule(f"{LAYER}{a}.weight", f"{ours}{b}/scale", D) for a, b in norms.items()]
    if experts is None:
        return RuleTable(
            [*rules, *_mlp_rules(c.mlp, D, ours, None)], {"layer": c.layers}, "model.", BUFFERS
        )
    sparse = frozenset(i for i, n in enumerate(counts) if n)
    sparse_only = sparse if is_mixed else None
    rules += _moe_rules(c, max(counts), experts, ours, sparse_only)
    if is_mixed:
        dense_width = c.dense or c.top_k * c.mlp
        rules += _mlp_rules(dense_width, D, ours, frozenset(range(c.layers)) - sparse)
    return RuleTable(rules, {"layer": c.layers, "expert": max(counts)}, "model.", BUFFERS)


def _attention_rules(c: Any, ours: str) -> Iterator[Rule]:
    D, G, Q, d = c.embed, c.kv_heads, c.heads // c.kv_heads, c.width
    path, theirs = f"{ours}attention/", f"{LAYER}self_attn."
    for name, start, n in (("q", 0, Q), ("k", Q, 1), ("v", Q + 1, 1)):
        out_features = G * n * d
        yield Rule(
            *(f"{theirs}{name}_proj.weight", f"{path}qkv/kernel", (out_features, D)),
            *((G, n, d, D), (3, 0, 1, 2), 2, start),
            transform="transpose, heads of keys first",
        )
        if c.qkv_bias:
            yield Rule(
                *(f"{theirs}{name}_proj.bias", f"{path}qkv/bias", (out_features,)),
                *((G, n, d), (0, 1, 2), 1, start),
                transform="heads of keys first",
            )
    yield Rule(
        *(f"{theirs}o_proj.weight", f"{path}out/kernel", (D, G * Q * d)),
        *((D, G * Q, d), (1, 2, 0)),
        transform="transpose, heads",
    )
    if c.qk_norm:
        for name in ("q", "k"):
            yield copy_rule(f"{theirs}{name}_norm.weight", f"{path}{name}_norm/scale", d)


def _mlp_rules(M: int, D: int, ours: str, layers: frozenset[int] | None) -> Iterator[Rule]:
    yield from _gated_rules(
        f"{LAYER}mlp.gate_proj", f"{LAYER}mlp.up_proj", f"{ours}mlp/gate_up/kernel", M, D, layers
    )
    yield transpose_rule(
        f"{LAYER}mlp.down_proj.weight", f"{ours}mlp/down/kernel", D, M, layers=layers
    )


def _gated_rules(
    gate: str, up: str, ours: str, M: int, D: int, layers: frozenset[int] | None
) -> Iterator[Rule]:
    """Yield the rules of the gate and up projections, which share one parameter."""
    for slot, name in enumerate((gate, up)):
        yield Rule(
            *(f"{name}.weight", ours, (M, D), (M, D, 1), (1, 0, 2), 2, slot, layers),
            transform="transpose, gate beside up",
        )


def _moe_rules(
    c: Any, count: int, names: ExpertNames, ours: str, layers: frozenset[int] | None
) -> Iterator[Rule]:
    M, D = c.mlp, c.embed
    router, experts_path = f"{LAYER}{names.router}.weight", f"{ours}mlp/each/"
    yield transpose_rule(router, f"{ours}mlp/router_kernel", count, D, layers=layers)
    yield from _gated_rules(
        f"{LAYER}{names.gate}", f"{LAYER}{names.up}", f"{experts_path}gate_up", M, D, layers
    )
    yield transpose_rule(f"{LAYER}{names.down}.weight", f"{experts_path}down", D, M, layers=layers)
