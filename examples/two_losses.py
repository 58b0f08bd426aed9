"""Two tasks that disagree, without the disagreement: PCGrad (Yu et al. 2020) on 8 devices.

One model predicts the digit of an image and how much ink it has. `step.gradients` of each task's
step gives a gradient; where the two point apart, each loses its part along the other; `with_tree`
and `apply` make the update. (pip install scikit-learn; nothing is downloaded.)
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hfjax

hfjax.simulate_devices(8)  # unless there are 8 GPUs


class Model(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.outer = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 11, rngs=rngs)

    def __call__(self, batch):
        return self.outer(nnx.relu(self.inner(batch["image"])))


def digit_loss(outputs, batch):
    logits = outputs[:, :10]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def ink_loss(outputs, batch):
    return (100 * (outputs[:, 10] - batch["image"].mean(1)) ** 2).mean()


@jax.jit
def pcgrad(one, other):
    """Return the sum of two gradients, each without its part against the other."""
    dot: Any = optax.tree.vdot(one, other)
    along = lambda g: jnp.minimum(dot, 0) / optax.tree.vdot(g, g)
    without = lambda g, h: optax.tree.add_scale(g, -along(h), h)
    return optax.tree.add(without(one, other), without(other, one)), dot < 0


def main(steps=200):
    """Train; return the accuracy, the error of the ink, and how often the tasks disagreed."""
    mesh = hfjax.make_mesh(data=2, fsdp=4)
    layout = hfjax.layout(Model, optax.adam(3e-3), mesh, hfjax.HSDP.edit(replicate_below=0))
    tasks = [hfjax.train_step(layout, loss) for loss in (digit_loss, ink_loss)]
    state, (images, labels) = hfjax.init(layout), digits()
    rng, conflicts = np.random.default_rng(0), 0
    for _ in range(steps):
        rows = rng.integers(0, 1500, 128)
        batch = {"image": images[rows], "label": labels[rows]}
        one, other = (task.gradients(state, batch)[0] for task in tasks)
        tree, is_conflict = pcgrad(one.tree(), other.tree())
        state, _ = tasks[0].apply(state, one.with_tree(tree))
        conflicts += int(is_conflict)
    test = {"image": images[1500:], "label": labels[1500:]}
    outputs = np.asarray(hfjax.to_model(layout, state)(test))
    accuracy = float((outputs[:, :10].argmax(1) == test["label"]).mean())
    error = float(np.abs(outputs[:, 10] - test["image"].mean(1)).mean())
    print(
        f"{accuracy:.1%} of the digits, ink to {error:.3f}; {conflicts} conflicts in {steps} steps"
    )
    return accuracy, error, conflicts


def digits():
    """Return all images, as rows of 64 numbers from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    return (data.data / 16).astype(np.float32), data.target.astype(np.int32)


if __name__ == "__main__":
    main()
