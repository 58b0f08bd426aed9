"""What a layout prints: its table with bytes per device, and notes on what did not fit."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
from jax.typing import DTypeLike

from hfjax.parallel.layer_costs import output_shapes
from hfjax.parallel.layer_order import arrange
from hfjax.parallel.mesh import ROW_AXIS, STACK, TENSOR_AXES, describe_mesh, in_use, size_of
from hfjax.parallel.offload.host_memory import is_host_sharding
from hfjax.parallel.packing import PackedLayers, packed_layers
from hfjax.parallel.param_specs import ParamSpecs, entries_of, keep_axes, num_shards, sizes_near
from hfjax.parallel.strategy import Axes, Strategy
from hfjax.sharding.check_layout import describe_gathered_experts
from hfjax.sharding.host_memory import HostMemory
from hfjax.sharding.storage import Source
from hfjax.utils.paths import Tree
from hfjax.utils.tables import align, human

READ = 'axes="auto"'  # how notes begin that say what a program shows


def layout_notes(layout: Any) -> Iterator[str]:
    """Yield what a strategy could not do, and what padding costs."""
    source, packed = layout.storage.source, layout.storage.packed
    if variables := layout.template.variables:
        few = ", ".join(
            f"{path} {x.dtype}{list(x.shape)}" for path, x in list(variables.items())[:3]
        )
        yield f"variables, not trained: {few}{' …' * (len(variables) > 3)} ({len(variables)})"
    yield from unmatched(source, packed is not None)
    yield from large_replicated(layout.strategy, layout.param_specs)
    if experts := describe_gathered_experts(layout.param_specs.values()):
        yield experts
    yield from layout.host_memory.notes()
    yield from layout.template.notes
    yield from optimizer_notes(layout)
    for path, n in count_frozen_layers(layout.param_specs).items():
        yield f"{path}: its first {n} layers stay as they are"
    if packed is not None:
        yield from padding_cost(source, packed)


def state_bytes(layout: Any) -> dict[str, int]:
    """Return bytes per device of a state and of gradients, by what they are and where they lie."""
    size = lambda p, spec, dtype: bytes_of_array(p.shape, dtype, spec, layout.mesh)
    optimizer_bytes = {False: 0, True: 0}  # on the host?
    for x in jax.tree.leaves(layout.abstract_state().optimizer):
        num_bytes = bytes_of_array(x.shape, x.dtype, x.sharding.spec, layout.mesh)
        optimizer_bytes[is_host_sharding(x.sharding)] += num_bytes
    parameters = sum(size(p, p.parameter, p.dtype) for p in layout.param_specs.values())
    totals = {
        "parameters": 0 if layout.host_memory.parameters else parameters,
        "gradients": sum(layout.gradient_bytes.values()),
        "optimizer_state": optimizer_bytes[False],
    }
    host_parameters = parameters - totals["parameters"]
    host = {"host parameters": host_parameters, "host optimizer_state": optimizer_bytes[True]}
    return totals | {name: n for name, n in host.items() if n}


def count_frozen_layers(param_specs: Mapping[str, ParamSpecs]) -> dict[str, int]:
    """Return path -> how many of the first layers of a stack are frozen."""
    return {path: p.frozen_layers for path, p in param_specs.items() if p.frozen_layers}


def unmatched(source: Source, packed: bool) -> Iterator[str]:
    """Report rules that match no parameter; refuse if a mesh axis is left without any.

    `packed`: a list of layers is stored in rows, which stages shard as they shard a stack.
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
        idle_axes = [axis for axis in axes if mesh.shape[axis] > 1 and axis not in matched]
        if idle_axes and axes and set(axes) <= {ROW_AXIS, *TENSOR_AXES}:
            read = "".join(f"\n{note}" for note in source.template.notes if note.startswith(READ))
            raise ValueError(
                f"strategy {strategy.name}: no parameter has an axis named "
                f"{', '.join(sorted(rules.keys() - names))}, so the mesh axis {idle_axes[0]} "
                f"({describe_mesh(mesh)}) would split nothing. The model's axes: "
                f"{', '.join(sorted(names)) or 'none are named'}. Name them: nnx.Param(x, "
                'axes=("embed", "mlp")), or layout(…, axes={pattern: names}), or axes="auto" with '
                f"example=batch.{read}"
            )
        yield f"row {rule} -> {'+'.join(axes)} of {strategy.name} matched no parameter"


def large_replicated(strategy: Strategy, param_specs: Mapping[str, ParamSpecs]) -> Iterator[str]:
    """Report large arrays that the rule `*` could not shard, or that there are none."""
    default_axes = (*strategy.parameters.get("*", ()), *strategy.optimizer_state.get("*", ()))
    is_all_small = all(p.small for p in param_specs.values())
    if is_all_small and any(in_use(p.mesh, default_axes) for p in param_specs.values()):
        yield (
            f"no parameter has {strategy.smallest} elements a layer: nothing is split. Split all: "
            f"{strategy.name}.edit(replicate_below=0)"
        )
    for column, rules in (
        ("parameter", strategy.parameters),
        ("optimizer_state", strategy.optimizer_state),
    ):
        axes = rules.get("*", ())
        for p in param_specs.values():
            if is_large_replicated(p, column, axes):
                size, over = size_of(axes, p.mesh), "+".join(in_use(p.mesh, axes))
                candidates = " or ".join(map(str, sizes_near([p], size)))
                yield (
                    f"{p.path} {p.shape}: no free dimension divides by {size} ({over}), its "
                    f"{column}s stay whole" + f"; by {candidates} one would" * bool(candidates)
                )


def is_large_replicated(p: ParamSpecs, column: str, axes: Axes) -> bool:
    """Return whether the rule `*` with these axes could not shard a large array."""
    split_axes = {a for entry in entries_of(getattr(p, column), 0) for a in entry}
    return bool(in_use(p.mesh, axes)) and not p.small and not split_axes & set(axes)


def stage_table(packed: PackedLayers) -> Iterator[str]:
    """Yield a line for each virtual stage of packed layers: where it is, how full its row is."""
    arrangement = packed.arrangement
    for (stage, chunk), numbers, num_bytes in zip(
        arrangement.homes, arrangement.stage_layers, packed.param_bytes, strict=True
    ):
        stage_text = f"stage {stage}" + f", chunk {chunk}" * (arrangement.virtual.shape[1] > 1)
        layers = (
            f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {numbers[0]}-{numbers[-1]}"
        )
        yield f"  {stage_text}: {layers}, {human(num_bytes)} of {human(packed.row_bytes)}"


def padding_cost(source: Source, packed: PackedLayers) -> Iterator[str]:
    """Yield what is stored and sent only because the rows of all virtual stages have one shape."""
    homes, entry_bytes = packed.arrangement.homes, packed.row_bytes
    padding = 1 - sum(packed.param_bytes) / max(entry_bytes * len(homes), 1)
    arrangement = arrange(source.layers_per_stage(len(homes), "parameters"), homes)
    shortest = packed_layers(source.template, source.mesh, arrangement).row_bytes
    hint = f', balance="parameters" makes it {human(shortest)}' if shortest < entry_bytes else ""
    yield (
        f"each of the {len(homes)} parts of the layers takes {human(entry_bytes)}, as the largest "
        f"needs: {padding:.0%} is padding{hint}"
    )
    if source.example is not None:
        yield _transfer_cost(source, packed)


def _transfer_cost(source: Source, packed: PackedLayers) -> str:
    x = source.embed_shapes
    outputs = output_shapes(source.layers, x)
    boundaries = [x, *(outputs[numbers[-1]] for numbers in packed.arrangement.stage_layers)]
    num_examples = jax.tree.leaves(source.example)[0].shape[0]
    sizes = [_bytes(tree) // num_examples for tree in boundaries]
    return (
        f"{human(max(sizes))} a row go from stage to stage, as the largest needs: "
        f"{', '.join(map(human, sizes))} after embed and each part"
    )


def _bytes(tree: Tree) -> int:
    return sum(a.size * jnp.dtype(a.dtype).itemsize for a in jax.tree.leaves(tree))


def layout_table(param_specs: Iterable[ParamSpecs], host_memory: HostMemory) -> Iterator[str]:
    """Yield how each parameter, gradient and optimizer state is sharded, and bytes per device."""
    header = ("parameter", "shape", "spec", "gradient", "optimizer_state", "bytes/device")
    yield from (
        f"  {line}" for line in align([header, *(_entry(p, host_memory) for p in param_specs)])
    )


def _entry(p: ParamSpecs, host_memory: HostMemory) -> tuple[str, ...]:
    used_axes = in_use(p.mesh, p.mesh.axis_names)  # an axis of size 1 shards nothing
    param_spec, gradient, optimizer_spec = (
        _spec_text(keep_axes(spec, used_axes))
        for spec in (p.parameter, p.gradient, p.optimizer_state)
    )
    unless_same = lambda text: "none" if p.frozen else "same" if text == param_spec else text
    size = human(bytes_of_array(p.shape, p.dtype, p.parameter, p.mesh))
    spec_text = param_spec + " on host" * host_memory.parameters
    on_host = _on_host(*host_memory.count_optimizer_state(p.path))
    optimizer_spec = unless_same(optimizer_spec) + on_host
    return (
        p.path,
        "x".join(map(str, p.shape)),
        spec_text,
        unless_same(gradient),
        optimizer_spec,
        size,
    )


def _on_host(num_on_host: int, count: int) -> str:
    return (
        ""
        if not num_on_host
        else " on host"
        if num_on_host == count
        else f", {num_on_host} of {count} on host"
    )


def _spec_text(spec: P) -> str:
    """Return a spec as it is written.

    >>> _spec_text(P(None, ("fsdp", "data"), "tensor"))
    'P(None, ("fsdp", "data"), "tensor")'
    """
    names = [[f'"{axis}"' for axis in axes] for axes in entries_of(spec, len(spec))]
    entries = (f"({', '.join(axes)})" if len(axes) > 1 else (*axes, "None")[0] for axes in names)
    return f"P({', '.join(entries)})"


def bytes_of_array(shape: tuple[int, ...], dtype: DTypeLike, spec: P, mesh: Mesh) -> int:
    """Return the bytes of one device's shard of an array."""
    itemsize = jax.ShapeDtypeStruct((), dtype).dtype.itemsize  # of a random key too
    return math.prod(shape) * itemsize // num_shards(spec, mesh)


def optimizer_notes(layout: Any) -> Iterator[str]:
    """Yield what an optimizer says of its parameters: its state has a method `notes`."""
    nodes = jax.tree.leaves(layout.state_shapes.optimizer, is_leaf=lambda x: hasattr(x, "notes"))
    for node in nodes:
        yield from node.notes(layout.arrays) if hasattr(node, "notes") else ()
