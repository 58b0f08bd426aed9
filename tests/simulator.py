"""PipeDream and 2BW, event by event from the table: the reference of the executor."""

from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from hfjax import Mean


class Simulator:
    """Stages as plain objects, each with an optimizer of its own; nothing of the executor."""

    def __init__(self, model_init, loss, optimizer, stages, data=1):
        model = model_init(nnx.Rngs(jax.random.key(0), dropout=jax.random.key(1)))
        self.graph, state = nnx.split(model, nnx.Param)
        params = nnx.to_pure_dict(state)
        layers = params.pop("layers")
        self.graph_layer = nnx.split(model.layers, nnx.Param)[0]
        self.whole = layers
        self.loss, self.optimizer, self.stages, self.data = loss, optimizer, stages, data
        count = len(jax.tree.leaves(layers)[0])
        mine = np.array_split(np.arange(count), stages)  # the first stages have more
        self.weights = [jax.tree.map(lambda a, i=i: a[i], layers) for i in mine]
        self.kept = [optimizer.init(w) for w in self.weights]
        self.ends, self.kept_ends = params, optimizer.init(params)
        self.run_stage = jax.jit(self._stage)
        self.pull_stage = jax.jit(lambda w, x, dy: jax.vjp(self._stage, w, x)[1](dy))
        self.pull_first = jax.jit(lambda e, b, dx: jax.vjp(lambda e: self._first(e, b), e)[1](dx))
        self.first, self.last = jax.jit(self._first), jax.jit(jax.grad(self._last, (0, 1), True))
        self.update = jax.jit(self._update)

    def _stage(self, weights, x):
        for i in range(len(jax.tree.leaves(weights)[0])):
            row = nnx.State(jax.tree.map(lambda a, i=i: a[i], weights))
            x = nnx.merge(self.graph_layer, row)(x)
        return x

    def _model(self, ends):
        return nnx.merge(self.graph, nnx.State({**ends, "layers": self.whole}))

    def _first(self, ends, batch):
        return self._model(ends).embed(batch)

    def _last(self, ends, x, batch):
        told = self.loss(self._model(ends).head(x), batch)
        if not isinstance(told, Mean):
            told = Mean(told * len(x), jnp.float32(len(x)))
        return told.total, told

    def _update(self, gradients, kept, weights):
        updates, kept = self.optimizer.update(gradients, kept, weights)
        return optax.apply_updates(weights, updates), kept

    def call(self, batch, table, every):
        """Run one call of the step; `every` None: PipeDream, else groups of 2BW."""
        self.table, self.every, m = table, every, table.microbatches
        # A device has neighbouring rows, and so does each microbatch of the device.
        cut = lambda a: np.swapaxes(a.reshape(self.data, m, -1, *a.shape[1:]), 0, 1)
        cut_all = jax.tree.map(lambda a: cut(a).reshape(m, -1, *a.shape[1:]), batch)
        self.batches = [jax.tree.map(lambda a, i=i: a[i], cut_all) for i in range(m)]
        self.versions = [[w] for w in self.weights]
        self.used, self.x, self.dy, self.told = {}, {}, {}, {}
        self.sums = [(0.0, 0.0)] * self.stages
        self.sum_ends, self.squares, self.stale = 0.0, 0.0, defaultdict(int)
        for (kind, stage, microbatch), _, _ in table.tasks():
            (self._forward if kind == "F" else self._backward)(stage, microbatch)
        return self._finish()

    def _forward(self, s, m):
        latest = len(self.versions[s]) - 1
        self.used[s, m] = latest if self.every is None else max(0, m // self.every - 1)
        if s == 0:
            self.x[0, m] = self.first(self.ends, self.batches[m])
        y = self.x[s + 1, m] = self.run_stage(self.versions[s][self.used[s, m]], self.x[s, m])
        if s == self.stages - 1:
            (d_ends, dy), self.told[m] = self.last(self.ends, y, self.batches[m])
            self._add_ends(d_ends)
            self.dy[s, m] = dy

    def _backward(self, s, m):
        own = self.versions[s][self.used[s, m]]
        gradients, dx = self.pull_stage(own, self.x[s, m], self.dy[s, m])
        self.stale[s] = max(self.stale[s], len(self.versions[s]) - 1 - self.used[s, m])
        self.dy[s - 1, m] = dx
        if s == 0:
            self._add_ends(self.pull_first(self.ends, self.batches[m], dx)[0])
        total, weight = self.sums[s]
        add = lambda g: jax.tree.map(jnp.add, total, g) if weight else g
        self.sums[s] = (add(gradients), weight + self.told[m].weight)
        if self.every is None or (m + 1) % self.every == 0:
            self._next_version(s)

    def _next_version(self, s):
        total, weight = self.sums[s]
        gradients = jax.tree.map(lambda g: g / weight if weight else 0 * g, total)
        self.squares += optax.tree.norm(gradients, squared=True)
        new, self.kept[s] = self.update(gradients, self.kept[s], self.versions[s][-1])
        self.versions[s].append(new)
        self.sums[s] = (0.0, 0.0)

    def _add_ends(self, gradients):
        old = self.sum_ends
        self.sum_ends = jax.tree.map(jnp.add, old, gradients) if old else gradients

    def _finish(self):
        told = list(self.told.values())
        total, weight = (sum(getattr(t, name) for t in told) for name in ("total", "weight"))
        gradients = jax.tree.map(lambda g: g / weight, self.sum_ends)
        self.ends, self.kept_ends = self.update(gradients, self.kept_ends, self.ends)
        updates = len(self.versions[0]) - 1
        self.weights = [versions[-1] for versions in self.versions]
        square = self.squares / updates + optax.tree.norm(gradients, squared=True)
        metrics = {"loss": total / weight, "grad_norm": jnp.sqrt(square), "weight": weight}
        for name in told[0].metrics:
            of = [t.metrics[name] for t in told]
            metrics[name] = sum(m.total for m in of) / sum(m.weight for m in of)
        return metrics

    def params(self):
        layers = jax.tree.map(lambda *rows: jnp.concatenate(rows), *self.weights)
        return {**self.ends, "layers": layers}
