"""Where everything lives: path, shape, PartitionSpec and bytes per device. Allocates nothing."""

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from hfjax.parallel.arrangement import Arrangement, arrange, counts
from hfjax.parallel.blueprint import Blueprint, blueprint
from hfjax.parallel.mesh import AXES, BATCH_AXES, PIPE_AXIS, TENSOR_AXES, describe_mesh, in_use
from hfjax.parallel.placement import (
    STACK,
    Array,
    auto_part,
    check_spec,
    columns,
    entries_of,
    pieces,
    size_of,
)
from hfjax.parallel.reduction import Placed
from hfjax.parallel.strategy import Strategy

_PARTS = ("parameter", "gradient", "moment")


@dataclass(frozen=True, eq=False)
class Layout:
    """Where parameters, gradients, moments and other variables live on a mesh."""

    mesh: Mesh
    strategy: Strategy
    optimizer: optax.GradientTransformation
    blueprint: Blueprint
    arrays: Mapping[str, Array]
    placed: Mapping[str, Placed]
    forward: Callable | None = None
    notes: tuple[str, ...] = field(default=())
    arrangement: Arrangement | None = None  # of layers on stages; None: the model's own order

    @property
    def specs(self) -> dict[str, P]:
        """Path -> PartitionSpec of each parameter; edit it and hand it to `with_specs`."""
        return {path: p.parameter for path, p in self.placed.items()}

    def with_specs(self, specs: Mapping[str, P]) -> "Layout":
        """Return the layout with these parameters placed so; gradients and moments follow."""
        placed = dict(self.placed)
        for path, spec in specs.items():
            if path not in placed:
                raise ValueError(f"no parameter {path!r}. {_nearest(path, placed)}")
            if not isinstance(spec, P):
                raise ValueError(f"{path}: a PartitionSpec is expected, found {spec!r}.")
            check_spec(self.arrays[path], spec, self.mesh)
            parts = columns(self.arrays[path], self.strategy, self.mesh, spec)
            placed[path] = replace(placed[path], **dict(zip(_PARTS, parts, strict=True)))
        return replace(self, placed=placed)

    def arranged(self, arrangement: Arrangement | None) -> "Layout":
        """Return the layout that stores stacked layers so; None: as the model has them."""
        return replace(self, arrangement=arrangement, placed=_stored(self, arrangement))

    @property
    def order(self) -> jax.Array | None:
        """The number of the layer in each stored row, -1 where there is none."""
        if self.arrangement is not None:
            return jnp.asarray(self.arrangement.rows, jnp.int32)
        layers = [self.arrays[p.path].shape[0] for p in self.placed.values() if p.stacked]
        return jnp.arange(layers[0], dtype="int32") if layers else None

    def shardings(self) -> Any:
        """Return the sharding of every array of the state, in the state's own form."""
        on = lambda spec: NamedSharding(self.mesh, spec)
        return jax.tree.map(on, self._state_specs(), is_leaf=lambda x: isinstance(x, P))

    def abstract_state(self) -> Any:
        """Return the state as shapes, dtypes and shardings: enough to compile a step."""
        shape = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        return jax.tree.map(shape, self._state_shapes, self.shardings())

    def create(self, seed: Any) -> "State":
        """Return the first state; under jit with `shardings()` it is born sharded."""
        arrays = self.blueprint.create(seed)
        params = nest({path: self._store(path, arrays[path]) for path in self.placed})
        variables = nest({path: arrays[path] for path in self.blueprint.variables})
        moments = self.optimizer.init(params)
        return State(jnp.zeros((), jnp.int32), params, moments, variables, self.order)

    def _store(self, path: str, array: jax.Array) -> jax.Array:
        if self.arrangement is None or not self.placed[path].stacked:
            return array
        return self.arrangement.store(array)

    @cached_property
    def _state_shapes(self) -> "State":
        return jax.eval_shape(self.create, 0)

    def _state_specs(self) -> "State":
        shapes = self._state_shapes
        return State(
            P(),
            nest(self.specs),
            jax.tree_util.tree_map_with_path(self._moment_spec, shapes.optimizer),
            jax.tree.map(lambda _: P(), shapes.variables),
            None if shapes.order is None else P(),
        )

    def _moment_spec(self, keys: tuple, leaf: Any) -> P:
        placed = self.parameter_of(keys, leaf)
        return P() if placed is None else placed.moment

    def parameter_of(self, keys: tuple, leaf: Any) -> Placed | None:
        """Return the parameter of which an array of the optimizer has the path and the shape."""
        names = [str(getattr(key, "key", "")) for key in keys]
        for start in range(len(names)):
            placed = self.placed.get("/".join(names[start:]))
            if placed is not None and placed.shape == leaf.shape:
                return placed
        return None

    def bytes_per_device(self) -> dict[str, int]:
        """Return bytes per device of parameters, gradients (accumulated) and optimizer state."""
        wide = lambda p: jnp.promote_types(p.dtype, jnp.float32)
        size = lambda p, spec, dtype: _bytes(p.shape, dtype, spec, self.mesh)
        placed = self.placed.values()
        state = self.abstract_state()
        return {
            "parameters": sum(size(p, p.parameter, p.dtype) for p in placed),
            "gradients": sum(size(p, p.gradient, wide(p)) for p in placed),
            "moments": sum(
                _bytes(x.shape, x.dtype, x.sharding.spec, self.mesh)
                for x in jax.tree.leaves(state.optimizer)
            ),
        }

    def unused_axes(self) -> list[str]:
        """Return mesh axes larger than 1 that split neither the batch nor any parameter."""
        used = {a for p in self.placed.values() for e in entries_of(p.parameter, 0) for a in e}
        working = {*BATCH_AXES, *(used & {PIPE_AXIS, *TENSOR_AXES})}
        return [axis for axis in in_use(self.mesh, AXES) if axis not in working]

    def __str__(self) -> str:
        return "\n".join(_table(self))

    __repr__ = __str__


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The state of a training run: plain arrays, sharded as the layout says."""

    step: Any
    params: Any
    optimizer: Any
    variables: Any  # what is not a parameter: statistics, random keys
    order: Any = None  # the number of the layer in each row of what stacks layers


def layout(
    model_init: Callable,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    strategy: Strategy,
    *,
    forward: Callable | None = None,
    axes: Mapping[str, tuple[str | None, ...]] | None = None,
) -> Layout:
    """Return where everything of `model_init(rngs)` lives under a strategy.

    `forward(model, batch)` says what the loss is given (default: `model(batch)`; a bare pytree
    itself). `axes` names the dimensions of parameters whose module does not: {path: names}.
    """
    _check_arguments(model_init, optimizer, mesh, strategy)
    plan = blueprint(model_init, _activation_placer(mesh, strategy))
    _check_paths(axes or {}, plan)
    _check_dtypes(plan)
    arrays = {
        path: Array(path, tuple(template.shape), plan.axes(path, axes or {}))
        for path, template in plan.parameters.items()
    }
    placed = {
        path: Placed(
            mesh,
            path,
            array.shape,
            plan.parameters[path].dtype,
            *columns(array, strategy, mesh),
            small=array.layer_size < strategy.smallest,
            stacked=array.axes[:1] == (STACK,),
        )
        for path, array in arrays.items()
    }
    notes = (*_unmatched(strategy, mesh, arrays), *_left_whole(strategy, placed))
    made = Layout(mesh, strategy, optimizer, plan, arrays, placed, forward, notes)
    return made.arranged(_one_chunk_each(made))


def _one_chunk_each(layout: Layout) -> Arrangement | None:
    """Return as many layers for each stage, one after the other, if layers lie on stages."""
    piped = [p for p in layout.placed.values() if p.home]
    if not piped:
        return None
    stages = layout.mesh.shape[PIPE_AXIS]
    parts = counts(piped[0].shape[0], stages, "even")
    return arrange(parts, [(stage, 0) for stage in range(stages)])


def _stored(layout: Layout, arrangement: Arrangement | None) -> dict[str, Placed]:
    """Return the placement of arrays whose first dimension has a row for each place."""
    placed = dict(layout.placed)
    for path, p in placed.items():
        if not p.stacked:
            continue
        layers, *rest = layout.arrays[path].shape
        rows = layers if arrangement is None else arrangement.rows.size
        placed[path] = replace(p, shape=(rows, *rest))
        if rows % pieces(P(*p.parameter[:1]), layout.mesh):  # only the model's own order
            placed[path] = replace(placed[path], **_beside(layout, p))
    return placed


def _beside(layout: Layout, p: Placed) -> dict[str, P]:
    """Return specs that split over the stages another dimension than the one of the layers."""
    array = layout.arrays[p.path]
    specs = {}
    for part in _PARTS:
        _, *rest = entries_of(getattr(p, part), len(array.shape))
        size = layout.mesh.shape[PIPE_AXIS]
        free = [i for i, axes in enumerate(rest) if not axes and array.shape[i + 1] % size == 0]
        if free:
            rest[free[0]] = (PIPE_AXIS,)
        specs[part] = P(None, *rest)
    return specs


def _activation_placer(mesh: Mesh, strategy: Strategy) -> Callable:
    """Return `place(x, names, gradient)`: puts an activation where the strategy's rows say.

    `gradient` names where its gradient lies; without it, where the activation does.
    """
    if not in_use(mesh, TENSOR_AXES):
        return lambda x, names, gradient=None: x

    def put(x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
        rows = [strategy.activations.get(name or "", ()) for name in names]
        return lax.with_sharding_constraint(x, auto_part(P(*rows)))

    @partial(jax.custom_vjp, nondiff_argnums=(1, 2))
    def place(x, names, gradient=None):
        return put(x, names)

    place.defvjp(
        lambda x, names, gradient: (put(x, names), None),
        lambda names, gradient, _, dx: (put(dx, gradient or names),),
    )
    return place


def _check_paths(axes: Mapping[str, tuple], plan: Blueprint) -> None:
    for path in axes:
        if path not in plan.parameters:
            raise ValueError(f"axes: no parameter {path!r}. {_nearest(path, plan.parameters)}")


def _nearest(path: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(path, known, n=3)
    near = near or [p for p in known if p.startswith(path)][:3]
    return f"Nearest: {near or 'none'}. All: layout.specs."


def _check_arguments(model_init: Any, optimizer: Any, mesh: Any, strategy: Any) -> None:
    wanted = {
        "model_init, a function of rngs": not callable(model_init)
        or isinstance(model_init, nnx.Module),
        "an optax optimizer": not hasattr(optimizer, "update"),
        "a mesh of hfjax.make_mesh": not isinstance(mesh, Mesh) or mesh.axis_names != AXES,
        "a hfjax.Strategy": not isinstance(strategy, Strategy),
    }
    given = [type(x).__name__ for x in (model_init, optimizer, mesh, strategy)]
    for (what, wrong), found in zip(wanted.items(), given, strict=True):
        if wrong:
            raise ValueError(
                f"layout(model_init, optimizer, mesh, strategy): {what} is expected, found {found}."
            )


def _check_dtypes(plan: Blueprint) -> None:
    for path, template in plan.parameters.items():
        if not jnp.issubdtype(template.dtype, jnp.floating):
            raise ValueError(
                f"{path} {tuple(template.shape)} is {template.dtype}: a parameter is a floating-"
                "point array. Keep what is not trained in another nnx.Variable."
            )


def _unmatched(strategy: Strategy, mesh: Mesh, arrays: Mapping[str, Array]) -> Iterator[str]:
    """Report rows that match no parameter; refuse if a mesh axis is left without any."""
    names = {name for array in arrays.values() for name in array.axes if name}
    rows = {row: axes for row, axes in strategy.parameters.items() if row != "*"}
    matched = {axis for row in rows.keys() & names for axis in rows[row]}
    for row, axes in rows.items():
        if row in names:
            continue
        idle = [axis for axis in axes if mesh.shape[axis] > 1 and axis not in matched]
        if idle and axes and set(axes) <= set(TENSOR_AXES):
            raise ValueError(
                f"strategy {strategy.name}: no parameter has an axis named "
                f"{', '.join(sorted(rows.keys() - names))}, so the mesh axis {idle[0]} "
                f"({describe_mesh(mesh)}) would split nothing. The model's axes: "
                f"{', '.join(sorted(names)) or 'none are named'}. Name them: nnx.Param(x, "
                'axes=("embed", "mlp")), or layout(…, axes={path: names}).'
            )
        yield f"row {row} -> {'+'.join(axes)} of {strategy.name} matched no parameter"


def _left_whole(strategy: Strategy, placed: Mapping[str, Placed]) -> Iterator[str]:
    """Report large arrays that the row `*` could not split, or that there is none."""
    stars = (*strategy.parameters.get("*", ()), *strategy.moments.get("*", ()))
    small = all(p.small for p in placed.values())
    if small and any(in_use(p.mesh, stars) for p in placed.values()):
        yield (
            f"no parameter has {strategy.smallest} elements a layer: nothing is split. Split all: "
            f"{strategy.name}.edit(replicate_below=0)"
        )
    for column, rows in (("parameter", strategy.parameters), ("moment", strategy.moments)):
        axes = rows.get("*", ())
        for p in placed.values():
            split = {a for entry in entries_of(getattr(p, column), 0) for a in entry}
            if in_use(p.mesh, axes) and not p.small and not split & set(axes):
                yield (
                    f"{p.path} {p.shape}: no free dimension divides by {size_of(axes, p.mesh)} "
                    f"({'+'.join(axes)}), its {column}s stay whole"
                )


def nest(flat: Mapping[str, Any]) -> dict:
    """Return {"a/b": x} as {"a": {"b": x}}."""
    tree: dict = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[name] = value
    return tree


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {"a": {"b": x}} as {"a/b": x}."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        nested = isinstance(value, Mapping)
        flat |= flatten(value, f"{prefix}{name}/") if nested else {prefix + name: value}
    return flat


def _bytes(shape: tuple[int, ...], dtype: Any, spec: P, mesh: Mesh) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize // pieces(spec, mesh)


def human(n: float) -> str:
    """Return a number of bytes as people write it.

    >>> human(3 * 2**20)
    '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def _table(layout: Layout) -> Iterator[str]:
    yield f"{layout.strategy.name} on {describe_mesh(layout.mesh)}"
    rows = [("parameter", "shape", "spec", "gradient", "moments", "bytes/device")]
    for p in layout.placed.values():
        same = lambda spec, p=p: "same" if spec == p.parameter else _show(spec)
        size = human(_bytes(p.shape, p.dtype, p.parameter, layout.mesh))
        shape = "x".join(map(str, p.shape))
        rows.append((p.path, shape, _show(p.parameter), same(p.gradient), same(p.moment), size))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  " + "  ".join(cells).rstrip()
    total = layout.bytes_per_device()
    yield "per device: " + ", ".join(f"{name} {human(size)}" for name, size in total.items())
    yield from (f"note: {note}" for note in layout.notes)


def _show(spec: P) -> str:
    entries = entries_of(spec, len(spec))
    return f"P({', '.join('+'.join(axes) if axes else '-' for axes in entries)})"
