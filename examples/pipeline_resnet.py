"""A small ResNet, a plain list of unlike layers, as a pipeline of four stages."""

import numpy as np
import optax
from flax import nnx

import hfjax

hfjax.simulate_devices(4)  # unless there are 4 GPUs


class Block(nnx.Module):
    def __init__(self, inside, outside, stride, *, rngs):
        self.conv = nnx.Conv(inside, outside, (3, 3), strides=stride, rngs=rngs)
        self.norm = nnx.GroupNorm(outside, num_groups=4, rngs=rngs)
        self.skip = nnx.Conv(inside, outside, (1, 1), strides=stride, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.norm(self.conv(x))) + self.skip(x)


class ResNet(nnx.Module):
    def __init__(self, *, rngs):
        widths = [(8, 8, 1), (8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 32, 2), (32, 32, 1)]
        self.stem = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.layers = nnx.List([Block(*shape, rngs=rngs) for shape in widths])
        self.out = nnx.Linear(32, 10, rngs=rngs)

    def embed(self, batch):
        return self.stem(batch["image"])

    def head(self, x):
        return self.out(x.mean((1, 2)))


def loss(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def main() -> None:
    rng = np.random.default_rng(0)
    label = rng.integers(0, 10, 64)
    image = rng.normal(size=(10, 16, 16, 1))[label] + 0.5 * rng.normal(size=(64, 16, 16, 1))
    batch = {"image": image.astype(np.float32), "label": label}
    model, optimizer = lambda rngs: ResNet(rngs=rngs), optax.adam(3e-3)
    layout = hfjax.layout(model, optimizer, hfjax.make_mesh(pipe=4), hfjax.PIPE, example=batch)
    schedule = hfjax.Schedule("1f1b", microbatches=8, balance="flops")
    step = hfjax.train_step(layout, loss, schedule=schedule)
    print(step.layout)
    state = hfjax.init(layout, schedule=schedule)
    for number in range(30):
        state, metrics = step(state, batch)
        if number % 10 == 9:
            print(f"step {number + 1}: loss {metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
