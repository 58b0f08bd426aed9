"""A plain NNX module, checked against one device under every strategy, then trained under FSDP."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hfjax
from hfjax.testing import assert_strategies_agree

hfjax.simulate_devices(8)  # unless there are 8 GPUs


class MLP(nnx.Module):
    def __init__(self, *, rngs):
        self.up, self.down = nnx.Linear(8, 256, rngs=rngs), nnx.Linear(256, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def squares(outputs, batch):
    return jnp.mean((outputs - batch["y"]) ** 2)


def main() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype(np.float32)
    batch, forward = {"x": x, "y": np.sin(x)}, lambda model, batch: model(batch["x"])
    init = lambda rngs: MLP(rngs=rngs)
    for name, apart in assert_strategies_agree(init, squares, batch, forward=forward).items():
        print(f"{name:<8} equals one device to {apart:.1e}")
    strategy = hfjax.FSDP.edit(replicate_below=0)
    layout = hfjax.layout(
        init, optax.adam(1e-2), hfjax.make_mesh(fsdp=8), strategy, forward=forward
    )
    print(layout)
    step, state = hfjax.train_step(layout, squares), hfjax.init(layout)
    print(hfjax.collectives(step.lower(batch)))
    for number in range(200):
        state, metrics = step(state, batch)
        if number % 50 == 49:
            print(f"step {number + 1}: loss {metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
