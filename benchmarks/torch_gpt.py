"""The GPT of these benchmarks in eager torch, on one device."""

# pyright: reportMissingImports=false

from collections.abc import Callable
from typing import Any

import jax
import torch


def torch_step(weights: Any, rows: Any, rate: float, decay: float) -> tuple[Callable, Any]:
    """Return a step of eager torch (fused AdamW and attention) from these weights, and its rows."""
    params = jax.tree.map(lambda x: torch.tensor(x).requires_grad_(), weights)
    leaves = jax.tree.leaves(params)
    optimizer = torch.optim.AdamW(leaves, lr=rate, weight_decay=decay, fused=True)
    tokens = torch.tensor(rows, dtype=torch.long)

    def step(state, tokens):
        optimizer.zero_grad()
        loss = _torch_loss(params, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()
        return state, loss.detach()

    return step, tokens


def _torch_loss(params: Any, tokens: Any) -> Any:
    x = params["tokens"][tokens[:, :-1]] + params["positions"][: tokens.shape[1] - 1]
    for layer in params["layers"]:
        x = _torch_layer(layer, x)
    logits = _torch_norm(params["norm"], x).flatten(0, 1) @ params["tokens"].T
    return torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def _torch_layer(p: Any, x: Any) -> Any:
    F = torch.nn.functional
    linear = lambda x, w, b: torch.addmm(b.flatten(), x, w.reshape(x.shape[-1], -1))
    flat = lambda x: x.flatten(0, 1)
    qkv = linear(flat(_torch_norm(p["norm1"], x)), p["qkv"], p["qkv_bias"])
    qkv = qkv.reshape(*x.shape[:2], *p["qkv_bias"].shape).permute(3, 0, 2, 1, 4)
    q, k, v = qkv.unbind(0)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = x + linear(flat(y), p["out"], p["out_bias"]).reshape(x.shape)
    wide = linear(flat(_torch_norm(p["norm2"], x)), p["up"], p["up_bias"])
    wide = F.gelu(wide, approximate="tanh")
    return x + linear(wide, p["down"], p["down_bias"]).reshape(x.shape)


def _torch_norm(p: Any, x: Any) -> Any:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], p["scale"], p["bias"])
