"""DeepSpeed's tutorial of experts, in JAX: convolutions and a mixture of experts read digits.

As there: residual experts behind convolutions, ZeRO-2 with the optimizer on the host, Adam,
WarmupLR and clipping; here on the 1,797 digits that scikit-learn holds (pip install scikit-learn;
nothing is downloaded).
"""

from dataclasses import replace
from itertools import islice
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hfjax
from hfjax.models.moe import MoE, RoutedOutputs, after_step, uses_router_metrics, with_routing

hfjax.simulate_devices(8)  # unless there are 8 GPUs

WIDTH, ROWS, STEPS = 64, 128, 150


class Digits(nnx.Module):
    def __init__(self, *, rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.inside = nnx.Linear(4 * 4 * 32, WIDTH, rngs=rngs)
        expert = lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        how = {"top_k": 1, "capacity": 1.25, "min_capacity": 1, "router": "deepspeed-top1"}
        how |= {"residual": True, "group": 16}  # an image is one token: capacity is of 16 images
        self.moe = MoE(WIDTH, 2 * WIDTH, experts=8, expert=expert, rngs=rngs, **how)
        self.out = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, batch):
        x = nnx.relu(self.conv2(nnx.relu(self.conv1(batch["image"]))))
        x = nnx.relu(self.inside(x.reshape(len(x), -1)))
        y, told = self.moe(x)
        return RoutedOutputs(self.out(nnx.relu(y)), told)

    def after_step(self, variables, metrics):
        return after_step(variables, metrics)  # adds load_max_over_mean and dropped_mean


@uses_router_metrics
def loss(routed, batch):
    logits, label = routed.outputs, batch["label"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    mean = with_routing(losses, jnp.ones_like(losses), routed)
    accuracy = (logits.argmax(-1) == label).mean()
    return replace(mean, metrics={**mean.metrics, "accuracy": accuracy})


def digits():
    """Return batches without end, and a batch that is not among them."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    rng = np.random.default_rng(0)
    order = rng.permutation(len(data.target))
    image = (data.images[order, :, :, None] / 16).astype(np.float32)
    take = lambda rows: {"image": image[rows], "label": data.target[order][rows].astype(np.int32)}
    batches = (take(rng.choice(len(order) - 256, ROWS, replace=False)) for _ in iter(int, 1))
    return batches, take(np.arange(len(order) - 256, len(order)))


def main() -> float:
    batches, unseen = digits()
    mesh = hfjax.make_mesh(data=2, expert=4)
    strategy = hfjax.ZERO2 | hfjax.EXPERT | hfjax.HOST_OPTIMIZER
    optimizer = optax.adam(
        hfjax.lr_schedule(3e-3, warmup_steps=20, type="constant", warmup_type="log")
    )
    layout = hfjax.layout(lambda rngs: Digits(rngs=rngs), optimizer, mesh, strategy)
    step, evaluate = (
        hfjax.train_step(layout, loss, max_grad_norm=1.0),
        hfjax.eval_step(layout, loss),
    )
    state = hfjax.init(layout)
    for number, batch in enumerate(islice(batches, STEPS), 1):
        state, metrics = step(state, batch)
        if number % 50 == 0:
            names = ("loss", "accuracy", "load_max_over_mean", "dropped_mean")
            told = ", ".join(f"{name} {float(metrics[name]):.3f}" for name in names)
            print(f"step {number}: {told}")
    accuracy = float(evaluate(state, unseen)["accuracy"])
    print(step.experts)
    print(f"accuracy on 256 digits that it has not seen: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
