"""The GPT of these benchmarks in torch as it is fastest on a GPU: torch.compile, SDPA, fused AdamW.

As nanoGPT writes it: float32 weights, bfloat16 under autocast, tied embeddings, biases.
"""

# pyright: reportMissingImports=false

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

BETAS = (0.9, 0.95)


class Block(nn.Module):
    """One layer."""

    def __init__(self, embed: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(embed), nn.LayerNorm(embed)
        self.qkv, self.out = nn.Linear(embed, 3 * embed), nn.Linear(embed, embed)
        self.up, self.down = nn.Linear(embed, 4 * embed), nn.Linear(4 * embed, embed)

    def forward(self, x: Any) -> Any:
        """Return the residual stream."""
        rows, length, embed = x.shape
        shape = rows, length, self.heads, embed // self.heads
        parts = self.qkv(self.norm1(x)).split(embed, dim=2)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, embed))
        wide = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.down(wide)


class GPT(nn.Module):
    """GPT-2; returns the loss of rows of tokens, of which the last is only a target."""

    def __init__(self, config: Any, again: bool = False):
        super().__init__()
        self.again = again  # each layer is computed again in the backward pass
        self.tokens = nn.Embedding(config.padded_vocab, config.embed)
        self.positions = nn.Embedding(config.length, config.embed)
        layers = (Block(config.embed, config.heads) for _ in range(config.layers))
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(config.embed)

    def forward(self, rows: Any) -> Any:
        """Return the mean cross entropy."""
        x = self.tokens(rows[:, :-1]) + self.positions.weight[: rows.shape[1] - 1]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def loaded(model: GPT, flat: dict[str, np.ndarray], layers: int) -> GPT:
    """Give the model hfjax's parameters, by path."""
    with torch.no_grad():
        _copy(model.tokens.weight, flat["tokens"])
        _copy(model.positions.weight, flat["positions"])
        _copy(model.norm.weight, flat["norm/scale"])
        _copy(model.norm.bias, flat["norm/bias"])
        for i in range(layers):
            own = {path: x[i] for path, x in flat.items() if path.startswith("layers/")}
            _load_layer(model.layers[i], {path[len("layers/") :]: x for path, x in own.items()})
    return model


def _load_layer(layer: Any, of: dict[str, np.ndarray]) -> None:
    embed = of["norm1/scale"].shape[0]
    for name in ("norm1", "norm2"):
        _copy(getattr(layer, name).weight, of[f"{name}/scale"])
        _copy(getattr(layer, name).bias, of[f"{name}/bias"])
    qkv = of["attention/qkv/kernel"].transpose(2, 1, 3, 0)  # [D, H, 3, d] -> [3, H, d, D]
    _copy(layer.qkv.weight, qkv.reshape(3 * embed, embed))
    _copy(layer.qkv.bias, of["attention/qkv/bias"].transpose(1, 0, 2).reshape(-1))
    for mine, path in (("out", "attention/out"), ("up", "mlp/up"), ("down", "mlp/down")):
        linear = getattr(layer, mine)
        _copy(linear.weight, of[f"{path}/kernel"].reshape(linear.in_features, -1).T)
        _copy(linear.bias, of[f"{path}/bias"].reshape(-1))


def _copy(to: Any, array: np.ndarray) -> None:
    to.copy_(torch.tensor(np.array(array)))


class Program:
    """A model under training, which returns its loss of a batch.

    Args:
        model: It is on its device.
        optimizer: Of its parameters.
        clip: The greatest norm of all gradients. None: any.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None):
        self.device = next(model.parameters()).device
        self.cuda = self.device.type == "cuda"
        self.parameters = list(model.parameters())
        self.optimizer, self.clip = optimizer, clip
        self.loss: Any = torch.compile(model, backend="inductor" if self.cuda else "eager")

    def compile(self, batch: Any) -> None:
        """Compile by a pass that changes no parameter; what it took counts in no peak."""
        self._gradients(batch)
        self.optimizer.zero_grad(set_to_none=True)
        self.rest()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def step(self, batch: Any) -> Any:
        """Take a step; return the loss."""
        loss = self._gradients(batch)
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _gradients(self, batch: Any) -> Any:
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = self.loss(batch)
        loss.backward()
        return loss.detach()

    def place(self, batch: Mapping[str, np.ndarray]) -> Any:
        """Return rows of tokens on the device."""
        return torch.tensor(batch["tokens"], dtype=torch.long, device=self.device)

    def wait(self) -> None:
        """Wait for all that was asked for."""
        if self.cuda:
            torch.cuda.synchronize()

    def rest(self) -> None:
        """Give back the memory that is not in use."""
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def peak(self) -> int | None:
        """Return the most bytes that were in use at once."""
        return torch.cuda.max_memory_allocated() if self.cuda else None


def prepared(
    config: Any, flat: dict[str, np.ndarray], rate: float, decay: float, again: bool = False
) -> Program:
    """Return the program of a model with hfjax's parameters, by path; on a GPU if one is there.

    `again`: each layer is computed again in the backward pass.
    """
    torch.set_float32_matmul_precision("high")
    model = loaded(GPT(config, again), flat, config.layers).to(chosen_device())
    return Program(model, _adamw(model, rate, decay), clip=1.0)


def chosen_device() -> str:
    """Return where programs of torch run."""
    cuda = torch.cuda.is_available() and not os.environ.get("BENCHMARK_ON_CPU")
    return "cuda" if cuda else "cpu"


def _adamw(model: nn.Module, rate: float, decay: float) -> torch.optim.Optimizer:
    """Return AdamW; weights of two or more dimensions decay."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).device.type == "cuda"
    return torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=fused)
