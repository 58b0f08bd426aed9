"""Families of pretrained models: as transformers has them, to float32's rounding.

tests/pretrained holds what it made of tiny models; make_fixtures.py there writes it anew.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from hfjax.models.gpt import GPT, GPTConfig
from hfjax.models.llama import Llama
from hfjax.models.loss import next_token_loss
from hfjax.models.moe.moe_llama import MoEConfig, MoELlama
from hfjax.weights.config_keys import config_of
from tests.pretrained.weights_of import drawn, told

FOLDER = Path(__file__).with_name("pretrained")
FAMILIES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def keys_of(family: str) -> dict:
    return json.loads((FOLDER / family / "config.json").read_text(encoding="utf-8"))


def shapes_of(family: str) -> dict[str, tuple[int, ...]]:
    tensors = json.loads((FOLDER / family / "tensors.json").read_text(encoding="utf-8"))["tensors"]
    return {name: tuple(shape) for name, (shape, _) in tensors.items()}


def gpt_arrays(config, of):
    """Return the arrays of a GPT-2 by path."""
    heads = (config.heads, config.embed // config.heads)

    def layer(i):
        at = lambda name: of[f"transformer.h.{i}.{name}"]
        norm = lambda name: {"scale": at(f"{name}.weight"), "bias": at(f"{name}.bias")}
        qkv, bias = at("attn.c_attn.weight"), at("attn.c_attn.bias")
        linear = lambda name: {"kernel": at(f"{name}.weight"), "bias": at(f"{name}.bias")}
        out = linear("attn.c_proj")
        return {
            "norm1": norm("ln_1"),
            "norm2": norm("ln_2"),
            "attention": {
                "qkv": {
                    "kernel": qkv.reshape(-1, 3, *heads).swapaxes(1, 2),
                    "bias": bias.reshape(3, *heads).swapaxes(0, 1),
                },
                "out": out | {"kernel": out["kernel"].reshape(*heads, -1)},
            },
            "mlp": {"up": linear("mlp.c_fc"), "down": linear("mlp.c_proj")},
        }

    ends = {"tokens": of["transformer.wte.weight"], "positions": of["transformer.wpe.weight"]}
    ln_f = {"scale": of["transformer.ln_f.weight"], "bias": of["transformer.ln_f.bias"]}
    return ends | {"norm": ln_f}, [layer(i) for i in range(config.layers)]


def heads_of(config, of, start, what):
    """Return queries, keys and values as one: [D, G, queries + 2, d], of biases without D."""
    q, k, v = (of[f"{start}.self_attn.{name}_proj.{what}"] for name in "qkv")
    shape = (config.kv_heads, -1, config.width, *q.shape[1:])
    joined = np.concatenate([x.reshape(shape) for x in (q, k, v)], axis=1)
    return np.moveaxis(joined, 3, 0) if joined.ndim == 4 else joined


def attention_arrays(config, of, start):
    out = of[f"{start}.self_attn.o_proj.weight"].T.reshape(config.heads, config.width, -1)
    qkv = {"kernel": heads_of(config, of, start, "weight")}
    if config.qkv_bias:
        qkv["bias"] = heads_of(config, of, start, "bias")
    norms = ("q_norm", "k_norm") if config.qk_norm else ()
    scales = {n: {"scale": of[f"{start}.self_attn.{n}.weight"]} for n in norms}
    return {"qkv": qkv, "out": {"kernel": out}} | scales


def gated(of, *names):
    """Return an MLP's kernels, gate and up as one."""
    gate, up, down = (of[f"{name}.weight"].T for name in names)
    return {"gate_up": np.stack([gate, up], -1), "down": down}


def mlp_arrays(of, start, experts):
    if not experts:
        names = (f"{start}.mlp.{n}_proj" for n in ("gate", "up", "down"))
        return {name: {"kernel": x} for name, x in gated(of, *names).items()}
    start, names = f"{start}.mlp", ("gate_proj", "up_proj", "down_proj")
    if f"{start}.gate.weight" not in of:
        start, names = start.replace("mlp", "block_sparse_moe"), ("w1", "w3", "w2")
    each = [gated(of, *(f"{start}.experts.{e}.{n}" for n in names)) for e in range(experts)]
    stacked = {name: np.stack([x[name] for x in each]) for name in each[0]}
    return {"router_kernel": of[f"{start}.gate.weight"].T, "each": stacked}


def layer_arrays(config, of, number):
    start = f"model.layers.{number}"
    names = {"norm1": "input", "norm2": "post_attention"}
    if config.norms_after:
        names |= {"norm1_after": "post_attention", "norm2": "pre_feedforward"}
        names |= {"norm2_after": "post_feedforward"}
    norms = {n: {"scale": of[f"{start}.{x}_layernorm.weight"]} for n, x in names.items()}
    experts = config.by_layer[number] if isinstance(config, MoEConfig) else 0
    attention = attention_arrays(config, of, start)
    return norms | {"attention": attention, "mlp": mlp_arrays(of, start, experts)}


def decoder_arrays(config, of):
    """Return the arrays of a decoder by path."""
    ends = {"tokens": of["model.embed_tokens.weight"], "norm": {"scale": of["model.norm.weight"]}}
    if not config.tied:
        ends["unembed"] = {"kernel": of["lm_head.weight"].T}
    return ends, [layer_arrays(config, of, i) for i in range(config.layers)]


def flat(tree, *before):
    """Return the arrays of a tree by their keys."""
    if not isinstance(tree, dict):
        return {before: tree}
    return {k: v for name, part in tree.items() for k, v in flat(part, *before, name).items()}


def arrays_of(config, of):
    """Return our arrays by their keys, of the tensors of a file."""
    ends, layers = (gpt_arrays if isinstance(config, GPTConfig) else decoder_arrays)(config, of)
    if isinstance(config, MoEConfig) and len(set(config.by_layer)) > 1:
        listed = {("layers", i, *k): v for i, x in enumerate(layers) for k, v in flat(x).items()}
        return flat(ends) | listed
    stacked = {("layers", *k): [flat(x)[k] for x in layers] for k in flat(layers[0])}
    return flat(ends) | {k: np.stack(v) for k, v in stacked.items()}


def model_of(config, weights):
    """Return a model whose parameters are those of the tensors of a file."""
    kind = {GPTConfig: GPT, MoEConfig: MoELlama}.get(type(config), Llama)
    model = kind(config, rngs=nnx.Rngs(0))
    arrays = arrays_of(config, weights)
    parameters = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    assert {k: v[...].shape for k, v in parameters.items()} == {
        k: v.shape for k, v in arrays.items()
    }
    nnx.update(model, nnx.from_flat_state({k: v.replace(arrays[k]) for k, v in parameters.items()}))
    return model


def of_files(config, shapes, gradients):
    """Return gradients by the names of a file: each number goes back to where its weight lay."""
    ends = np.cumsum([np.prod(shape) for shape in shapes.values()], dtype=int)
    numbers = np.split(np.arange(ends[-1]), ends[:-1])
    places = {n: x.reshape(s) for (n, s), x in zip(shapes.items(), numbers, strict=True)}
    found, seen = np.zeros(ends[-1], np.float32), np.zeros(ends[-1], int)
    for keys, at in arrays_of(config, places).items():
        found[at] = gradients[keys]
        seen[at] += 1
    assert (seen == 1).all()
    return {n: found[x] for n, x in places.items()}


def apart(found, wanted) -> float:
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def errors_of(family: str) -> dict[str, float]:
    """Return how far logits, the loss and each gradient are from those of transformers."""
    config, shapes = config_of(keys_of(family)), shapes_of(family)
    expected = np.load(FOLDER / family / "expected.npz")
    model = model_of(config, {name: drawn(name, shape) for name, shape in shapes.items()})
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)
    batch = {"tokens": expected["tokens"]}

    def loss(parameters):
        logits = nnx.merge(graph, parameters, rest)(batch)
        mean = next_token_loss(logits, batch)
        return mean.total / mean.weight, logits

    (found, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(parameters)
    flat_gradients = {k: v[...] for k, v in nnx.to_flat_state(gradients)}
    by_name = of_files(config, shapes, flat_gradients)
    rows = np.asarray(logits - expected["logits"])
    at = np.linalg.norm(rows, axis=-1) / np.linalg.norm(expected["logits"], axis=-1)
    wanted = {n: expected[f"gradient/{n}"] for n in by_name}
    joined = lambda x: np.concatenate([x[n].ravel() for n in by_name])
    found_of = {n: told(n, g) for n, g in by_name.items()}
    return {
        "logits": float(at.max()),
        "loss": apart(found, expected["loss"]),
        "gradients": apart(joined(found_of), joined(wanted)),
        "one gradient": max(apart(found_of[n], wanted[n]) for n in wanted),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_gradients_are_those_of_transformers(family):
    errors = errors_of(family)
    assert max(errors.values()) < 1e-5, errors
