"""A GAN on 8 devices: two networks, two layouts, trained in turns; it learns to write digits.

Each network trains with its own step. The other one's parameters are `extra` of `step.gradients`:
they get no gradient, and are gathered where the loss uses them, however they are sharded.
(pip install scikit-learn matplotlib; nothing is downloaded.)
"""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hfjax
from two_losses import digits

hfjax.simulate_devices(8)  # unless there are 8 GPUs

LATENT, WIDTH, BATCH, STEPS = 32, 256, 128, 1500


class Generator(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(LATENT, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.middle = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.outer = nnx.Linear(WIDTH, 64, rngs=rngs)

    def __call__(self, z):
        x = nnx.relu(self.norm(self.inner(z)))
        return nnx.sigmoid(self.outer(nnx.relu(self.middle(x))))


class Discriminator(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(64, WIDTH, rngs=rngs)
        self.middle = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.outer = nnx.Linear(WIDTH, 1, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        x = self.drop(nnx.leaky_relu(self.inner(x), 0.2))
        return self.outer(self.drop(nnx.leaky_relu(self.middle(x), 0.2)))[:, 0]


def main(steps=STEPS, picture=None):
    """Train; return which digits a classifier sees in what is generated, and how surely."""
    adam = optax.adam(1e-3, b1=0.5)
    sharded = hfjax.FSDP.edit(replicate_below=0)
    generator = hfjax.layout(
        Generator, adam, hfjax.make_mesh(fsdp=8), sharded, forward=lambda g, batch: g(batch["z"])
    )

    def judge(d, batch, extra):
        fake = hfjax.merge(generator, extra)(batch["z"])
        return d(batch["image"]), d(fake)

    discriminator = hfjax.layout(
        Discriminator, adam, hfjax.make_mesh(data=8), hfjax.DDP, forward=judge
    )

    def loss_of_discriminator(scores, batch):
        real, fake = scores
        return (nnx.softplus(-0.9 * real) + nnx.softplus(fake)).mean()

    def loss_of_generator(fake, batch, extra):
        d = hfjax.merge(discriminator, extra["params"], extra["variables"])
        return nnx.softplus(-d(fake)).mean()

    step_d = hfjax.train_step(discriminator, loss_of_discriminator)
    step_g = hfjax.train_step(generator, loss_of_generator)
    g, d = hfjax.init(generator, seed=0), hfjax.init(discriminator, seed=1)
    images, labels, rng = *digits(), np.random.default_rng(0)
    for n in range(1, steps + 1):
        draw = lambda: rng.normal(size=(BATCH, LATENT)).astype(np.float32)
        batch = {"image": images[rng.integers(0, len(images), BATCH)], "z": draw()}
        gradients, of_d = step_d.gradients(d, batch, extra=g.params)
        d, _ = step_d.apply(d, gradients)
        other = {"params": d.params, "variables": d.variables}
        gradients, of_g = step_g.gradients(g, {"z": draw()}, extra=other)
        g, _ = step_g.apply(g, gradients)
        if n % 250 == 0:
            losses = float(of_d["loss"]), float(of_g["loss"])
            print("step {}: discriminator {:.3f}, generator {:.3f}".format(n, *losses))
    z = np.random.default_rng(1).normal(size=(200, LATENT)).astype(np.float32)
    fake = np.asarray(hfjax.to_model(generator, g)(jnp.asarray(z)))
    if picture:
        draw_digits(fake[:80], picture)
    return judged(images, labels, fake)


def judged(images, labels, fake):
    """Return the digits that a classifier of real images sees, and its mean probability."""
    from sklearn.linear_model import LogisticRegression

    found = LogisticRegression(max_iter=300).fit(images, labels).predict_proba(fake)
    seen = sorted({int(k) for k in found.argmax(1)})
    sure = float(found.max(1).mean())
    print(f"a classifier sees the digits {seen}, with a mean probability of {sure:.2f}")
    return seen, sure


def draw_digits(fake, path):
    """Write the images into one picture, ten in a row."""
    import matplotlib.pyplot as plt

    framed = np.pad(fake.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
    rows = framed.reshape(-1, 10, 10, 10).transpose(0, 2, 1, 3).reshape(-1, 100)
    plt.imsave(path, np.kron(rows, np.ones((6, 6))), cmap="gray_r")
    print(f"{Path(path)} shows {len(fake)} of them")


if __name__ == "__main__":
    main(picture=sys.argv[1] if len(sys.argv) > 1 else None)
