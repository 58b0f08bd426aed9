"""The data plane of a step that updates each layer in the backward pass, and then forgets its
gradient.

As soon as a layer's gradients are there they are reduced over all devices, divided by the weight
of the loss (the head has told it before) and applied; parameters and moments are stacks that the
loop carries and updates in place. Rows of a stack keep their first dimension, of length 1, so that
specs and masks fit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from hfjax.mean import Mean, as_mean
from hfjax.parallel.arrangement import arrange
from hfjax.parallel.asynchronous import Held
from hfjax.parallel.blueprint import LAYERS
from hfjax.parallel.by_layer import ByLayer
from hfjax.parallel.fetch import Dims, give, on_tensor_shards
from hfjax.parallel.gradients import DataPlane, cast_inputs, rows_of, variables_of
from hfjax.parallel.layers import saving_policy
from hfjax.parallel.mesh import TENSOR_AXES, in_use
from hfjax.parallel.placement import auto_part, size_of
from hfjax.parallel.reduction import Flat, Placed, Reduction
from hfjax.parallel.staged import Staged


class Own(NamedTuple):
    """What the backward pass updates, layer by layer."""

    parameters: Flat  # stacks [L, ...]
    moments: Flat
    squares: Flat  # path -> [L], of the gradient of the total
    finite: jax.Array  # loss, and the gradients of the layers that are done


@dataclass(frozen=True)
class LayerUpdatePlane(DataPlane):
    """A data plane whose layers are updated during the backward pass."""

    def __post_init__(self):
        """Nothing accumulates: every gradient goes to its moments' place at once."""
        placed = {path: replace(p, gradient=p.moment) for path, p in self.placed.items()}
        object.__setattr__(self, "placed", placed)

    def train(
        self, held: Held, batch: Any, step: jax.Array, apply: Callable, belongs: Mapping[str, str]
    ) -> tuple[Held, Flat, jax.Array, Flat, Mean]:
        """Return the layers' new parameters and moments; squares; finite; ends' gradients; Mean.

        `apply(gradients, moments, counts, parameters) -> (parameters, moments)` is given rows of
        the layers' stacks and gradients of the mean; the ends' gradients are those of the total.
        `belongs` says of each of the moments to which parameter it belongs.
        """

        def device(held, batch, step):
            unread = set(self.placed)
            staged = self._staged(held, batch, step, unread)
            run = _Updates(self, staged, held, apply, belongs)
            own, ends, mean = run.by_layer().run(run.own(), run.told)
            self._check_all_read(unread)
            gradients = self._reduced(self._given(ends, staged), self.placed)
            new = Held(own.parameters, {}, own.moments, {})
            return new, own.squares, own.finite, gradients, mean

        specs, moments = self._specs("parameter"), self._specs("moment")
        of_moments = {name: moments[path] for name, path in belongs.items()}
        trained = {path: specs[path] for path in self._of_layers}
        ends = {path: moments[path] for path in self._trained if path not in trained}
        in_specs = (Held(specs, P(), of_moments, P()), P(self._batch_axes), P())
        out_specs = (Held(trained, P(), of_moments, P()), P(), P(), ends, P())
        return self._shard_map(device, in_specs, out_specs)(held, batch, step)

    @property
    def _of_layers(self) -> list[str]:
        """The layers' parameters that have a gradient."""
        return [path for path in self._trained if path.startswith(LAYERS)]

    @property
    def _layers(self) -> int:
        return next(p.shape[0] for path, p in self.placed.items() if path.startswith(LAYERS))

    @property
    def guards(self) -> bool:
        """Whether a layer keeps its parameters if its gradient is not finite."""
        return self.execution.nonfinite != "apply"

    def _gathered_once(self, p: Placed) -> bool:
        """Return whether a split parameter is gathered for the whole step: if that is asked for."""
        return bool(p.split("parameter")) and not self.execution.reshard_after_forward

    def _staged(self, held: Held, batch: Any, step: Any, unread: set[str]) -> Staged:
        """Return the model in three parts."""
        random, statistics = self._sort(self._varying(held.variables))
        rows = rows_of(batch)
        keys = self._keys(random, rows, step)
        parameters = self._gather_once(self._varying(held.parameters))
        inputs = cast_inputs(batch, self._precision.compute)
        return Staged(
            blueprint=self.blueprint,
            arrangement=arrange([self._layers], [(0, 0)]),
            parameters=parameters,
            movements={path: self._movement(p, unread) for path, p in self.placed.items()},
            slots=self._slots(),
            variables=lambda m, i: {**variables_of(statistics, i), **keys(i, m, rows)},
            inputs=lambda m: inputs,
            mean=lambda outputs, m: as_mean(self.loss(outputs, batch), rows),
            mode="train",
            policy=saving_policy(self.execution, gathers=False),
            tells=None,
            keeps_last=False,
            mark=self._varying,
        )

    def _given(self, ends: Flat, staged: Staged) -> Flat:
        """Return the gradients of the ends where they accumulate."""
        wide = lambda p: jnp.promote_types(p.dtype, jnp.float32)
        trained = {path: g for path, g in ends.items() if not self.placed[path].frozen}
        return self._pin(
            {p: give(staged.movements[p], g, wide(self.placed[p])) for p, g in trained.items()}
        )

    def _reduced(self, gradients: Flat, placed: Mapping[str, Placed]) -> Flat:
        return Reduction(self._precision, self._hierarchical)(gradients, placed)


@dataclass(frozen=True)
class _Updates:
    """The updates of one step, on one device."""

    plane: LayerUpdatePlane
    staged: Staged
    held: Held
    apply: Callable
    belongs: Mapping[str, str]

    def by_layer(self) -> ByLayer:
        """Return the pass that makes them."""
        plane = self.plane
        return ByLayer(
            model=self._model,
            layers=plane._layers,
            values=self._values,
            update=self._update,
            mark=plane._varying,
            unroll=plane.execution.unroll or 1,
        )

    @property
    def _model(self) -> Any:
        model = self.staged.model()
        row = lambda path: lax.index_in_dim(self.staged.slots[path], 0, 0, keepdims=False)
        return replace(model, slots={path: row(path) for path in model.slots})

    def own(self) -> Own:
        """Return what is to be updated, as it is before."""
        zeros = jnp.zeros(self.plane._layers, jnp.promote_types(float, jnp.float32))
        return Own(
            {path: self.held.parameters[path] for path in self.plane._of_layers},
            self.held.moments,
            dict.fromkeys(self.plane._of_layers, zeros),
            jnp.array(True),
        )

    def told(self, mean: Mean) -> Mean:
        """Return what the head tells, of all devices."""
        return self.plane._sum(mean)

    def _values(self, own: Own, i: Any) -> Flat:
        """Return a layer's parameters as they are stored, or as they stay gathered."""
        constant = {
            path: x
            for path, x in self.staged.parameters.items()
            if path.startswith(LAYERS)
            and (path not in own.parameters or self.plane._gathered_once(self.plane.placed[path]))
        }
        stacks = self.plane._varying(own.parameters | constant)
        return {path: lax.dynamic_index_in_dim(x, i, 0, False) for path, x in stacks.items()}

    # -- one layer ----------------------------------------------------------------------------

    def _update(self, own: Own, i: Any, gradients: Flat, mean: Mean) -> Own:
        """Return what is updated after the backward pass of layer i."""
        rows = self.plane._pin({path: g[None] for path, g in gradients.items()})
        total = self.plane._reduced(rows, self._placed)
        squares = self._squares(total)
        finite = own.finite & jnp.isfinite(mean.total) & jnp.isfinite(sum(squares.values()))
        take = lambda tree: jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i, 1), tree)
        before = self._mine(take(own.parameters)), take(own.moments)
        after = self.apply(self._scaled(total, mean.weight), before[1], self.held.counts, before[0])
        if self.plane.guards:
            after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
        put = lambda x, row: lax.dynamic_update_slice_in_dim(x, row, i, 0)
        tell = lambda x, square: x.at[i].set(square)
        return Own(
            jax.tree.map(put, own.parameters, self._all(after[0])),
            jax.tree.map(put, own.moments, self._pinned(after[1])),
            jax.tree.map(tell, own.squares, squares),
            finite,
        )

    @property
    def _placed(self) -> dict[str, Placed]:
        """Where a row of each of the layers' stacks lies."""
        placed = self.plane.placed
        return {p: replace(placed[p], shape=(1, *placed[p].shape[1:])) for p in self.plane._of_layers}

    def _squares(self, gradients: Flat) -> Flat:
        """Return the sum of the squares of each gradient, of all its pieces."""
        squares = {path: jnp.square(g).sum(dtype=_wide(g)) for path, g in gradients.items()}
        groups: dict[tuple, Flat] = {}
        for path, square in squares.items():
            varying = jax.typeof(square).manual_axis_type.varying
            axes = tuple(axis for axis in self.plane._axes if axis in varying)
            groups.setdefault(axes, {})[path] = square
        for axes, group in groups.items():
            if axes:
                sums = lax.psum(jnp.stack([*group.values()]), axes)
                squares |= dict(zip(group, sums, strict=True))
        return squares

    def _scaled(self, gradients: Flat, weight: jax.Array) -> Flat:
        """Return gradients of the mean from those of the total."""
        scale = 1 / weight
        mean = lambda path, g: (g * scale.astype(g.dtype)).astype(self.plane.placed[path].dtype)
        return {path: mean(path, g) for path, g in gradients.items()}

    def _mine(self, rows: Flat) -> Flat:
        """Return of each row the piece that this device updates: where its moments lie."""
        return {path: _piece(self._placed[path], x) for path, x in rows.items()}

    def _all(self, rows: Flat) -> Flat:
        """Return the rows as they are stored, from the pieces that devices have updated."""
        whole = {path: _together(self._placed[path], x) for path, x in rows.items()}
        return self._pin_as("parameter", whole, {path: path for path in whole})

    def _pinned(self, moments: Flat) -> Flat:
        return self._pin_as("moment", moments, self.belongs)

    def _pin_as(self, column: str, arrays: Flat, belongs: Mapping[str, str]) -> Flat:
        """Keep tensor axes where the column has them."""
        if not in_use(self.plane.mesh, TENSOR_AXES):
            return arrays
        spec = lambda name: auto_part(getattr(self._placed[belongs[name]], column))
        return {n: lax.with_sharding_constraint(x, spec(n)) for n, x in arrays.items()}


def _wide(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _further(p: Placed) -> Dims:
    """Return the dimensions that moments split and parameters do not, from the end."""
    done = {axis for _, axes in p.split("parameter") for axis in axes}
    rest = [(dim, tuple(a for a in axes if a not in done)) for dim, axes in p.split("moment")]
    return tuple((dim, axes) for dim, axes in rest if axes)


def _piece(p: Placed, x: jax.Array) -> jax.Array:
    """Return this device's piece of a parameter, as its moments are split."""

    def cut(x):
        for dim, axes in _further(p):
            length = x.shape[dim] // size_of(axes, p.mesh)
            start = lax.axis_index(axes) * length
            x = lax.dynamic_slice_in_dim(x, start, length, x.ndim + dim)
        return x

    return on_tensor_shards(cut, p.tensor, x.ndim)(x) if _further(p) else x


def _together(p: Placed, x: jax.Array) -> jax.Array:
    """Return the parameter as it is stored, from the pieces of all devices."""

    def gather(x):
        for dim, axes in reversed(_further(p)):
            x = lax.all_gather(x, axes, axis=x.ndim + dim, tiled=True, to="invarying")
        return x

    return on_tensor_shards(gather, p.tensor, x.ndim)(x) if _further(p) else x
