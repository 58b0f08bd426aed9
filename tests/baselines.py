"""Baselines as steps of training: programs to count, and runs that the equality kit compares."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from baselines.data_parallel import data_parallel_step
from baselines.halving_doubling import halving_doubling_all_reduce
from baselines.links import Links, links
from baselines.parameter_server import parameter_server_step
from baselines.pieces import in_pieces
from baselines.ring import ring_all_reduce
from baselines.training import Step, all_reduce_step
from baselines.two_level import two_level_all_reduce
from hfjax.parallel.strategy import DDP
from hfjax.testing import Case, TrainResult, record_gradients

NODE, DEVICE = "node", "device"
ROWS = 96
random = np.random.default_rng(0)
PARAMETERS = {"up": random.normal(size=(6, 8)) / 3, "down": random.normal(size=(8, 6)) / 3}
BATCH = {"x": random.normal(size=(ROWS, 6)), "y": random.normal(size=(ROWS, 6))}
NUMBERS = 96  # of all parameters
ADAM = optax.adam(1e-2, eps=1e-4)
OPTIMIZER = optax.chain(record_gradients(), ADAM)


def forward(parameters, batch):
    return jnp.tanh(batch["x"] @ parameters["up"]) @ parameters["down"]


def of_outputs(outputs, batch):
    return jnp.mean((outputs - batch["y"]) ** 2)


def loss(parameters, batch):
    return of_outputs(forward(parameters, batch), batch)


def on_one_device(steps: int) -> TrainResult:
    model = lambda rngs: jax.tree.map(jnp.asarray, PARAMETERS)
    case = Case(model, loss, BATCH, ADAM, steps, {}, {"precision": "fp64"})
    return case.run(DDP, {"data": 1})


@dataclass(frozen=True)
class Baseline:
    """A step of one device, and who has parameters and rows of the batch; others have NaN."""

    step: Step
    sizes: Mapping[str, int]  # of the mesh
    owners: range
    workers: range

    @property
    def devices(self) -> int:
        return int(np.prod(list(self.sizes.values())))

    @property
    def shards(self) -> int:
        """Into how many pieces the owners cut the parameters; 0: each has them as they are."""
        return len(self.owners) if self.owners[-1] < self.workers[0] else 0

    def stacked(self, dtype: Any) -> tuple[Any, Any]:
        """Return parameters and rows, with an entry for each device."""
        cast = lambda tree: jax.tree.map(lambda x: np.asarray(x, dtype), tree)
        if self.shards:
            pieces = in_pieces(ravel_pytree(cast(PARAMETERS))[0], self.shards)
            parameters = self._given(self.owners, list(pieces))
        else:
            parameters = self._given(self.owners, [cast(PARAMETERS)] * len(self.owners))
        parts = np.arange(ROWS).reshape(len(self.workers), -1)
        rows = [jax.tree.map(lambda x, part=part: x[part], cast(BATCH)) for part in parts]
        return parameters, self._given(self.workers, rows)

    def _given(self, devices: range, trees: list) -> Any:
        nothing = jax.tree.map(lambda x: np.full_like(x, np.nan), trees[0])
        given = dict(zip(devices, trees, strict=True))
        all_of_them = [given.get(device, nothing) for device in range(self.devices)]
        return jax.tree.map(lambda *x: np.stack(x), *all_of_them)

    def program(self, mesh: Any) -> Any:
        def of_one(*trees):
            mine = jax.tree.map(lambda x: x[0], trees)
            return jax.tree.map(lambda x: x[None], self.step(*mine))

        spec = P(tuple(self.sizes))
        specs = {"in_specs": spec, "out_specs": spec, "check_vma": False}
        return jax.jit(jax.shard_map(of_one, mesh=mesh, **specs))

    def lowered(self) -> jax.stages.Lowered:
        """Return the program for devices that need not be here."""
        axis_types = (AxisType.Auto,) * len(self.sizes)
        mesh = AbstractMesh(tuple(self.sizes.values()), tuple(self.sizes), axis_types=axis_types)
        parameters, rows = self.stacked(np.float32)
        state = jax.eval_shape(jax.vmap(OPTIMIZER.init), parameters)
        traced = self.program(mesh).trace(parameters, state, rows)
        return traced.lower(lowering_platforms=("cpu",))

    def links(self) -> Links:
        return links(self.lowered())

    def run(self, steps: int) -> TrainResult:
        """Return what training leaves, of whoever has it."""
        mesh = jax.make_mesh(
            tuple(self.sizes.values()),
            tuple(self.sizes),
            axis_types=(AxisType.Auto,) * len(self.sizes),
            devices=jax.devices()[: self.devices],
        )
        program, losses, gradients = self.program(mesh), [], {}
        parameters, rows = self.stacked(np.float64)
        state = jax.jit(jax.vmap(OPTIMIZER.init))(parameters)
        for number in range(steps):
            parameters, state, each = program(parameters, state, rows)
            losses.append(float(np.mean([each[worker] for worker in self.workers])))
            gradients = gradients if number else self._whole(state[0])
        return TrainResult(losses, gradients, self._whole(parameters), {}, {})

    def _whole(self, stacked: Any) -> Any:
        if self.shards:
            vector = jnp.concatenate([np.asarray(stacked)[owner] for owner in self.owners])
            return jax.tree.map(np.asarray, ravel_pytree(PARAMETERS)[1](vector[:NUMBERS]))
        each = [jax.tree.map(lambda x, i=i: np.asarray(x[i]), stacked) for i in self.owners]
        for other in each[1:]:  # to the last bit: or copies would drift apart
            jax.tree.map(np.testing.assert_array_equal, each[0], other)
        return each[0]


def data_parallel(n: int) -> Baseline:
    step = data_parallel_step(forward, of_outputs, OPTIMIZER, DEVICE)
    return Baseline(step, {DEVICE: n}, range(1), range(1))


def parameter_server(n: int, servers: int) -> Baseline:
    step = parameter_server_step(loss, OPTIMIZER, PARAMETERS, DEVICE, servers)
    return Baseline(step, {DEVICE: n}, range(servers), range(servers, n))


def all_reduce(method: Any, n: int) -> Baseline:
    step = all_reduce_step(loss, OPTIMIZER, partial(method, axis=DEVICE), DEVICE)
    return Baseline(step, {DEVICE: n}, range(n), range(n))


ring = partial(all_reduce, ring_all_reduce)
halving_doubling = partial(all_reduce, halving_doubling_all_reduce)


def two_level(nodes: int, devices: int, across: Any = ring_all_reduce) -> Baseline:
    method = partial(two_level_all_reduce, inside=DEVICE, across=NODE, all_reduce=across)
    step, all_of_them = all_reduce_step(loss, OPTIMIZER, method, (NODE, DEVICE)), nodes * devices
    return Baseline(step, {NODE: nodes, DEVICE: devices}, range(all_of_them), range(all_of_them))
