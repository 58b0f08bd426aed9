"""The data plane of a pipeline: microbatches go through the stages of the axis `pipe`.

It also says when `remat="except_last"` (torchgpipe's: recompute in all microbatches but the last)
is impossible, and how much memory waits between ticks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from hfjax.base.mean import as_mean
from hfjax.base.paths import Flat, Tree
from hfjax.parallel.activation_offload import Share, Tensor
from hfjax.parallel.arrangement import Arrangement
from hfjax.parallel.autodiff.program import bytes_of
from hfjax.parallel.engine.blueprint import LAYERS
from hfjax.parallel.engine.fetch import scatter
from hfjax.parallel.engine.gradients import DataPlane, cast_inputs, rows_of, variables_of
from hfjax.parallel.engine.parts import Extras, PlacedModel
from hfjax.parallel.mesh import PIPE_AXIS, TENSOR_AXES, describe_mesh, in_use
from hfjax.parallel.pipeline.executor import Pipeline
from hfjax.parallel.pipeline.heterogeneous import HeterogeneousModel
from hfjax.parallel.pipeline.packing import PackedLayers
from hfjax.parallel.pipeline.rings import check_rings
from hfjax.parallel.placement import Placed
from hfjax.parallel.schedules.compile import Ticks
from hfjax.parallel.schedules.table import Table


def check_except_last(table: Table, placed: Mapping[str, Placed], mesh: Mesh) -> None:
    """Refuse a table, or a placement, that does not go with remat="except_last"."""
    if table.split:
        raise ValueError(
            f'remat="except_last": {table.name} splits backward passes in two (B and W). Use a '
            'schedule that does not (gpipe, 1f1b, interleaved), or remat="full" or "none".'
        )
    if axes := in_use(mesh, TENSOR_AXES):
        raise ValueError(
            f'remat="except_last" on {describe_mesh(mesh)}: layers send over {axes[0]}, and in a '
            'tick some stages recompute, others do not. Use remat="full" or "none".'
        )
    for path, p in placed.items():
        if path.startswith(LAYERS) and p.split("gradient"):
            raise ValueError(
                f'remat="except_last": the gradient of {path} is scattered layer by layer '
                f"({p.gradient}), and in a tick some stages recompute, others do not. Use "
                'hfjax.ZERO1, which scatters at the end, or remat="full" or "none".'
            )


@dataclass(frozen=True)
class PipelinePlane(DataPlane):
    """A data plane that runs by a table; a microbatch of the step is split again."""

    arrangement: Arrangement  # of the layers on stages
    ticks: Ticks
    packed: PackedLayers | None = None  # how a list of layers is stored on them
    wanted: str | None = None  # "losses" or "outputs": gives `Extras` in place of a Mean

    def __post_init__(self):
        super().__post_init__()
        if self._run.remat.what == "except_last":
            check_except_last(self.ticks.table, self.placed, self.mesh)
        if self.execution.offload is not None:
            check_rings(self.ticks.table, self.execution.offload, self._platform)
        if self._run.remat.unit > 1:
            raise ValueError(
                f"{self._run.remat}: in a pipeline each layer is computed again by itself. Use "
                'remat="full", "dots", "none", "except_last" or names.'
            )

    @property
    def _reads_once(self) -> bool:
        return False

    @property
    def _told_specs(self) -> Any:
        return P() if self.wanted is None else Extras(P(), P(self._batch_axes))

    def _evaluated(self, stored: Flat, held: Flat, batch: Any) -> Any:
        variables = lambda m, layer: variables_of(held, layer)
        return self._pipeline(self._staged(stored, batch, variables, "eval"))[2]

    def _microbatch(
        self, parameters: Flat, random: Flat, local_rows: int, step: Any, traced: tuple[set, set]
    ) -> Callable:
        """Return (statistics, batch, number) -> (gradients, what is told, statistics)."""
        unread, _ = traced
        keys = self._keys(random, local_rows, step)

        def run(statistics, batch, number):
            staged = self._training(parameters, statistics, batch, (keys, number), unread)
            gradients, outside, told = self._pipeline(staged)
            trained = {path: g for path, g in outside.items() if not self.placed[path].frozen}
            gradients |= {path: self._give(self.placed[path], g) for path, g in trained.items()}
            return self._pin({path: gradients[path] for path in self._trained}), told, statistics

        return run

    def _gathered_once(self, p: Placed) -> bool:
        """Return whether a split parameter stays gathered: also when that is asked for."""
        kept = p.split("parameter") and not self.execution.reshard_after_forward
        return bool(kept) or super()._gathered_once(p)

    def _training(self, parameters, statistics, batch, keys_of, unread) -> PlacedModel:
        """Return the model in three parts for a microbatch of the step, and its random keys."""
        count = self.ticks.table.microbatches
        rows, (keys, number) = rows_of(batch) // count, keys_of

        def variables(m, layer):
            return {**variables_of(statistics, layer), **keys(layer, number * count + m, rows)}

        return self._staged(parameters, batch, variables, "train", unread)

    def _staged(self, parameters, batch, variables, mode, unread=None) -> PlacedModel:
        """Return the model in three parts for one pass over the microbatches of `batch`."""
        count = self.ticks.table.microbatches
        split = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        at = lambda m: jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, m, 0, False), split)
        moves = {
            path: self._movement(p, set() if unread is None else unread, mode == "train")
            for path, p in self.placed.items()
        }
        kind = (
            PlacedModel if self.packed is None else partial(HeterogeneousModel, packed=self.packed)
        )
        return kind(
            blueprint=self.blueprint,
            arrangement=self.arrangement,
            parameters=parameters,
            movements=moves,
            slots=jax.eval_shape(self._slots),
            variables=variables,
            inputs=lambda m: cast_inputs(at(m), self._precision.compute),
            mean=lambda outputs, m: as_mean(self.loss(outputs, at(m)), rows_of(batch) // count),
            mode=mode,
            policy=self._policy(views=self._run.tells_names),
            wanted=self.wanted,
            keeps_last=self._run.remat.what == "except_last",
        )

    def _pipeline(self, staged: PlacedModel) -> tuple[Any, Any, Any]:
        """Return the gradients of the layers, those of the rest, and the mean (or `Extras`)."""
        layers, outside, told = self._executor(staged).run()
        if self.wanted is None:
            return layers, outside, jax.tree.map(lambda x: x.sum(0), told)
        by_row = lambda x: x.reshape(-1, *x.shape[2:])
        return layers, outside, Extras(told.means, jax.tree.map(by_row, told.outputs))

    @property
    def _offloading(self) -> Callable | None:
        return None if self._run.keeps_all else self._choose

    def _executor(self, staged: PlacedModel) -> Pipeline:
        chosen = self._offloading
        return Pipeline(self.ticks, staged.model(), self._unroll, chosen)

    def _choose(self, tensors: Sequence[Tensor], layers: int) -> Share:
        """Return which tensors of a layer go to the host, and tell it."""
        return self._run.choose(tensors, "layers", layers)

    @property
    def _unroll(self) -> int | bool:
        """How many layers of a stage follow each other without a loop.

        On a CPU all, if nothing is recomputed: with one stage XLA would merge what is recomputed
        with what it was computed from, and apart they are a copy of the stage's parameters more.
        """
        unroll = self.execution.unroll
        if unroll is not None:
            return unroll
        return (self._platform == "cpu" and self._run.remat.what == "none") or 1

    def _give(self, p: Placed, gradient: jax.Array) -> jax.Array:
        """Return a gradient, summed over all microbatches, where it accumulates."""
        move = self._movement(p, set())
        wide = jnp.promote_types(p.dtype, jnp.float32)
        gradient = gradient.astype(move.reduce)
        return scatter(gradient, move.scatter, move.tensor, move.sending).astype(wide)

    def _sum(self, tree: Tree) -> Any:
        if isinstance(tree, Extras):
            return Extras(self._sum(tree.means), self._from_last_stage(tree.outputs))
        return super()._sum(tree)

    def _from_last_stage(self, outputs: Any) -> Any:
        """Return on every stage what is zero on all but the last.

        In float32 on a CPU: its compiler aborts on a sum in bfloat16.
        """
        if not in_use(self.mesh, (PIPE_AXIS,)):
            return outputs

        def send(x):
            narrow = self._platform == "cpu" and x.dtype == jnp.bfloat16
            return lax.psum(x.astype(jnp.float32) if narrow else x, PIPE_AXIS).astype(x.dtype)

        return jax.tree.map(send, outputs)


# what waits -> the rings (and queues) that it lies in
WAITING = {
    "activations": ("stash", "late", "cross", "kept"),
    "messages": ("x", "dy", "sent", "dx"),
}


@dataclass(frozen=True)
class _Recording(PipelinePlane):
    """A plane that notes what its executor begins with."""

    told: dict[str, Any] = field(default_factory=dict)

    def _executor(self, staged: PlacedModel) -> Pipeline:
        pipeline = super()._executor(staged)
        program, shapes = jax.make_jaxpr(pipeline._start, return_shape=True)()
        form = jax.tree.structure(shapes)
        self.told.update(form.unflatten(program.out_avals))  # these know their memory
        return pipeline


def waiting(
    plane: PipelinePlane, parameters: Flat, variables: Flat, batch: Any, step: Any
) -> Mapping[str, tuple[int, int]]:
    """Return what waits on a stage: {"activations": (bytes on the device, on the host), …}."""
    telling = _Recording(**{f.name: getattr(plane, f.name) for f in fields(PipelinePlane)})
    jax.eval_shape(telling.gradients, parameters, variables, batch, step)
    return {what: _bytes([telling.told.get(n) for n in names]) for what, names in WAITING.items()}


def _bytes(tree: Tree) -> tuple[int, int]:
    leaves = jax.tree.leaves(tree)
    on_host = [getattr(x, "memory_space", None) == jax.memory.Space.Host for x in leaves]
    host = [x for x, there in zip(leaves, on_host, strict=True) if there]
    return bytes_of(leaves) - bytes_of(host), bytes_of(host)
