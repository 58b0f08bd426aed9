"""What a layout prints: its table with bytes per device, and notes on what did not fit."""

import math
from collections.abc import Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
from jax.typing import DTypeLike

from hfjax.parallel.layer_costs import output_shapes
from hfjax.parallel.layer_order import arrange
from hfjax.parallel.mesh import ROW_AXIS, STACK, TENSOR_AXES, describe_mesh, in_use, size_of
from hfjax.parallel.packing import PackedLayers, packed_layers
from hfjax.parallel.param_specs import Placed, entries_of, keep, pieces, sizes_near
from hfjax.parallel.strategy import Axes, Strategy
from hfjax.sharding.host_memory import Hosted
from hfjax.sharding.storage import Source
from hfjax.utils.paths import Tree
from hfjax.utils.tables import aligned, human


def unmatched(source: Source, packed: bool) -> Iterator[str]:
    """Report rules that match no parameter; refuse if a mesh axis is left without any.

    `packed`: a list of layers lies in rows, which stages split as they split a stack.
    """
    strategy, mesh = source.strategy, source.mesh
    names = {name for array in source.arrays.values() for name in array.axes if name}
    if packed:
        names.add(STACK)
    rules = {rule: axes for rule, axes in strategy.parameters.items() if rule != "*"}
    matched = {axis for rule in rules.keys() & names for axis in rules[rule]}
    for rule, axes in rules.items():
        if rule in names:
            continue
        idle = [axis for axis in axes if mesh.shape[axis] > 1 and axis not in matched]
        if idle and axes and set(axes) <= {ROW_AXIS, *TENSOR_AXES}:
            raise ValueError(
                f"strategy {strategy.name}: no parameter has an axis named "
                f"{', '.join(sorted(rules.keys() - names))}, so the mesh axis {idle[0]} "
                f"({describe_mesh(mesh)}) would split nothing. The model's axes: "
                f"{', '.join(sorted(names)) or 'none are named'}. Name them: nnx.Param(x, "
                'axes=("embed", "mlp")), or layout(…, axes={path: names}).'
            )
        yield f"row {rule} -> {'+'.join(axes)} of {strategy.name} matched no parameter"


def left_whole(strategy: Strategy, placed: Mapping[str, Placed]) -> Iterator[str]:
    """Report large arrays that the rule `*` could not split, or that there is none."""
    stars = (*strategy.parameters.get("*", ()), *strategy.moments.get("*", ()))
    small = all(p.small for p in placed.values())
    if small and any(in_use(p.mesh, stars) for p in placed.values()):
        yield (
            f"no parameter has {strategy.smallest} elements a layer: nothing is split. Split all: "
            f"{strategy.name}.edit(replicate_below=0)"
        )
    for column, rules in (("parameter", strategy.parameters), ("moment", strategy.moments)):
        axes = rules.get("*", ())
        for p in placed.values():
            if is_left_whole(p, column, axes):
                size, over = size_of(axes, p.mesh), "+".join(in_use(p.mesh, axes))
                near = " or ".join(map(str, sizes_near([p], size)))
                yield (
                    f"{p.path} {p.shape}: no free dimension divides by {size} ({over}), its "
                    f"{column}s stay whole" + f"; by {near} one would" * bool(near)
                )


def is_left_whole(p: Placed, column: str, axes: Axes) -> bool:
    """Return whether the rule `*` that names these axes could not split a large array."""
    split = {a for entry in entries_of(getattr(p, column), 0) for a in entry}
    return bool(in_use(p.mesh, axes)) and not p.small and not split & set(axes)


def table_of_stages(packed: PackedLayers) -> Iterator[str]:
    """Yield a line for each part of a list of layers: where it lies, what it fills of its row."""
    at = packed.arrangement
    for (stage, chunk), numbers, held in zip(at.homes, at.parts, packed.held_bytes, strict=True):
        place = f"stage {stage}" + f", chunk {chunk}" * (at.virtual.shape[1] > 1)
        layers = (
            f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {numbers[0]}-{numbers[-1]}"
        )
        yield f"  {place}: {layers}, {human(held)} of {human(packed.row_bytes)}"


def cost_of_padding(source: Source, packed: PackedLayers) -> Iterator[str]:
    """Yield what is stored and sent only because all parts of the layers have one shape."""
    homes, row = packed.arrangement.homes, packed.row_bytes
    padding = 1 - sum(packed.held_bytes) / max(row * len(homes), 1)
    best = arrange(source.shares(len(homes), "parameters"), homes)
    shortest = packed_layers(source.blueprint, source.mesh, best).row_bytes
    better = f', balance="parameters" makes it {human(shortest)}' if shortest < row else ""
    yield (
        f"each of the {len(homes)} parts of the layers takes {human(row)}, as the largest needs: "
        f"{padding:.0%} is padding{better}"
    )
    if source.example is not None:
        yield _cost_of_sending(source, packed)


def _cost_of_sending(source: Source, packed: PackedLayers) -> str:
    x = source.embedded
    outputs = output_shapes(source.layers, x)
    between = [x, *(outputs[numbers[-1]] for numbers in packed.arrangement.parts)]
    rows = jax.tree.leaves(source.example)[0].shape[0]
    sizes = [_bytes(tree) // rows for tree in between]
    return (
        f"{human(max(sizes))} a row go from stage to stage, as the largest needs: "
        f"{', '.join(map(human, sizes))} after embed and each part"
    )


def _bytes(tree: Tree) -> int:
    return sum(a.size * jnp.dtype(a.dtype).itemsize for a in jax.tree.leaves(tree))


def table_of(placed: Iterable[Placed], hosted: Hosted) -> Iterator[str]:
    """Yield where each parameter, its gradient and its moments lie, and its bytes per device."""
    heads = ("parameter", "shape", "spec", "gradient", "moments", "bytes/device")
    yield from (f"  {line}" for line in aligned([heads, *(_row(p, hosted) for p in placed)]))


def _row(p: Placed, hosted: Hosted) -> tuple[str, ...]:
    used = in_use(p.mesh, p.mesh.axis_names)  # an axis of size 1 splits nothing
    where, gradient, moments = (
        _as_python(keep(spec, used)) for spec in (p.parameter, p.gradient, p.moment)
    )
    same = lambda text: "none" if p.frozen else "same" if text == where else text
    size = human(bytes_of_array(p.shape, p.dtype, p.parameter, p.mesh))
    place = where + " on host" * hosted.parameters
    moments = same(moments) + _on_host(*hosted.of(p.path))
    return p.path, "x".join(map(str, p.shape)), place, same(gradient), moments, size


def _on_host(there: int, of: int) -> str:
    return "" if not there else " on host" if there == of else f", {there} of {of} on host"


def _as_python(spec: P) -> str:
    """Return a spec as it is written.

    >>> _as_python(P(None, ("fsdp", "data"), "tensor"))
    'P(None, ("fsdp", "data"), "tensor")'
    """
    names = [[f'"{axis}"' for axis in axes] for axes in entries_of(spec, len(spec))]
    shown = (f"({', '.join(axes)})" if len(axes) > 1 else (*axes, "None")[0] for axes in names)
    return f"P({', '.join(shown)})"


def bytes_of_array(shape: tuple[int, ...], dtype: DTypeLike, spec: P, mesh: Mesh) -> int:
    """Return the bytes of one device's shard of an array."""
    one = jax.ShapeDtypeStruct((), dtype).dtype.itemsize  # of a random key too
    return math.prod(shape) * one // pieces(spec, mesh)
