"""haiscale's pipeline in JAX: partition a list of layers, forward_backward, any optax optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hfjax

hfjax.simulate_devices(4)  # unless there are 4 GPUs


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(x)))


def squares(outputs, y):
    return jnp.mean((outputs - y) ** 2)


def main() -> None:
    rngs = nnx.Rngs(0)
    parts = hfjax.compat.partition(
        [Block(rngs=rngs) for _ in range(6)], stages=2, balance="parameters"
    )
    pipe = hfjax.compat.PipeDream(parts, microbatches=8, mesh=hfjax.make_mesh(pipe=2, data=2))
    print(parts, pipe, sep="\n")
    optimizer = optax.adam(3e-3)
    opt_state = optimizer.init(pipe.parameters)
    x = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
    for step in range(60):
        losses, _ = pipe.forward_backward(x, criterion=squares, labels=(np.sin(2 * x),))
        updates, opt_state = optimizer.update(pipe.gradients, opt_state, pipe.parameters)
        pipe.parameters = optax.apply_updates(pipe.parameters, updates)
        if step % 20 == 19:
            print(f"step {step + 1}: loss {losses.mean():.4f}, {len(losses)} microbatches")
    print("evaluated:", pipe.evaluate(x, criterion=squares, labels=(np.sin(2 * x),)))


if __name__ == "__main__":
    main()
