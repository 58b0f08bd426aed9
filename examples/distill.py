"""A small network learns from a large one that lies under another layout.

The teacher trains under FSDP on eight devices, the student on two axes. The teacher's parameters
are `extra` of `step.gradients`: frozen, gathered where the loss uses them, and never copied to the
student's layout. (pip install scikit-learn; nothing is downloaded.)
"""

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import hfjax
from two_losses import digits

hfjax.simulate_devices(8)  # unless there are 8 GPUs


class Network(nnx.Module):
    def __init__(self, width, rngs):
        self.inner, self.outer = nnx.Linear(64, width, rngs=rngs), nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, batch):
        return self.outer(nnx.relu(self.inner(batch["image"])))


def of_labels(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def main(steps=150):
    """Train both; return the accuracy of the teacher and of its student."""
    images, labels = digits()
    rng = np.random.default_rng(0)
    fsdp, hsdp = (s.edit(replicate_below=0) for s in (hfjax.FSDP, hfjax.HSDP))
    large = hfjax.layout(
        lambda rngs: Network(256, rngs), optax.adam(3e-3), hfjax.make_mesh(fsdp=8), fsdp
    )
    small = hfjax.layout(
        lambda rngs: Network(16, rngs), optax.adam(1e-2), hfjax.make_mesh(data=2, fsdp=4), hsdp
    )

    def drawn():
        rows = rng.integers(0, 1500, 128)
        return {"image": images[rows], "label": labels[rows]}

    def of_teacher(logits, batch, extra):
        """Hinton's loss: the student's answers, softened, are those of the teacher."""
        soft = lambda x: jax.nn.log_softmax(x / extra["temperature"])
        wanted = soft(hfjax.merge(large, extra["teacher"])(batch))
        return (jax.numpy.exp(wanted) * (wanted - soft(logits))).sum(1).mean()

    teach, teacher = hfjax.train_step(large, of_labels), hfjax.init(large, seed=0)
    for _ in range(steps):
        teacher, _ = teach(teacher, drawn())
    learn, student = hfjax.train_step(small, of_teacher), hfjax.init(small, seed=1)
    extra = {"teacher": teacher.params, "temperature": 4.0}
    metrics: Any = {}
    for _ in range(2 * steps):
        gradients, metrics = learn.gradients(student, drawn(), extra=extra)
        student, _ = learn.apply(student, gradients)
    test = {"image": images[1500:], "label": labels[1500:]}
    right = lambda layout, state: float(
        (np.asarray(hfjax.to_model(layout, state)(test)).argmax(1) == test["label"]).mean()
    )
    found = right(large, teacher), right(small, student)
    print("the teacher knows {:.1%} of new digits, its student {:.1%}".format(*found))
    print(f"divergence from the teacher: {float(metrics['loss']):.4f}")
    return found


if __name__ == "__main__":
    main()
