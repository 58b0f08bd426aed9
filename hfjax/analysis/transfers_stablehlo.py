"""Reads the copies between device and host out of a StableHLO module.

A program says where a value is to lie (`annotate_device_placement`), not where it was: the walk
follows every value from the arguments on, through calls, loops and branches.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from hfjax.analysis import hlo
from hfjax.analysis.memory_copies import Copy, Placement, Shape, constrained, entered, follow, left
from hfjax.analysis.stablehlo import Bound, Module, dtype_of, integer, trips

PLACEMENT = "annotate_device_placement"
HOST = ("pinned_host", "unpinned_host")
_MANUAL = "sdy.manual_computation"
_CALL = "func.call"
Known = dict[Any, Placement]
Seen = tuple[list[Copy], list[Placement]]  # what a region copies, and where its results lie


class Copies:
    """The copies of a module, each function walked once for each way that it is called."""

    def __init__(self, module: Any):
        self.module = Module(module)
        devices = module.operation.attributes
        self.one = ir.IntegerAttr(devices["mhlo.num_partitions"]).value == 1
        self.walked: dict[tuple[str, Bound, tuple[Placement, ...], bool], Seen] = {}

    def found(self) -> list[Copy]:
        """Return the copies of one call of the public main function."""
        main = self.module.symbols["main"]
        arguments = main.regions[0].blocks[0].arguments
        given = ir.ArrayAttr(main.attributes["arg_attrs"]) if "arg_attrs" in main.attributes else ()
        attributes = [ir.DictAttr(a) for a in given] or [{}] * len(arguments)
        lies = [self._argument(v, a) for v, a in zip(arguments, attributes, strict=True)]
        return self._call("main", (None,) * len(lies), tuple(lies), self.one)[0]

    def _argument(self, value: Any, attributes: Any) -> Placement:
        kind = attributes["mhlo.memory_kind"] if "mhlo.memory_kind" in attributes else None
        split = None
        if "sdy.sharding" in attributes:
            split = self._split(attributes["sdy.sharding"], None)
        return Placement(kind is not None and ir.StringAttr(kind).value in HOST, split)

    def _split(self, sharding: Any, old: Shape | None) -> Shape | None:
        """Return in how many pieces each dimension is split; open ones stay as they were."""
        sharding = sdy.TensorShardingAttr(sharding)
        mesh = self.module.meshes.get(ir.FlatSymbolRefAttr(sharding.mesh_or_ref).value, {})
        pieces: list[int | None] = []
        for dimension in map(sdy.DimensionShardingAttr, sharding.dimension_shardings):
            count = 1
            for axis in map(sdy.AxisRefAttr, dimension.axes):
                part: Any = axis.sub_axis_info
                count *= mesh.get(axis.name, 1) if part is None else part.size
            named = len(dimension.axes) > 0 or dimension.is_closed
            pieces.append(count if named else None)
        return constrained(pieces, old)

    def _call(self, name: str, bound: Bound, lies: tuple[Placement, ...], local: bool) -> Seen:
        key = (name, bound, lies, local)
        if key not in self.walked:
            region = self.module.symbols[name].regions[0]
            self.walked[key] = self._region(region, bound, lies, {}, local)
        return self.walked[key]

    def _region(
        self, region: Any, bound: Bound, lies: Sequence[Placement], outside: Mapping, local: bool
    ) -> Seen:
        """Return what one run through a region copies, and where what it returns lies."""
        (block,) = region.blocks
        known: Known = {**outside, **dict(zip(block.arguments, lies, strict=True))}
        found: list[Copy] = []
        *operations, last = (op.operation for op in block.operations)
        for op in operations:
            copies, results = self._visit(op, bound, known, local)
            found += copies
            known.update(zip(op.results, results, strict=True))
        return found, [known.get(value, Placement()) for value in last.operands]

    def _visit(self, op: ir.Operation, bound: Bound, known: Known, local: bool) -> Seen:
        """Return what an operation copies, with all that it calls or contains."""
        given = tuple(known.get(value, Placement()) for value in op.operands)
        if op.name == "stablehlo.custom_call" and _target(op) == PLACEMENT:
            return self._placed(op, given[0], local)
        if op.name == _CALL:
            callee = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
            return self._call(callee, tuple(integer(v, bound) for v in op.operands), given, local)
        if op.name == _MANUAL:
            return self._manual(op, bound, given, known, local)
        if op.name == "stablehlo.while":
            return self._loop(op, bound, given, known, local)
        if op.name in ("stablehlo.case", "stablehlo.if"):
            return self._branches(op, bound, known, local)
        if op.name == "stablehlo.optimization_barrier":
            return [], list(given)
        if op.name == "sdy.sharding_constraint" and not local:
            split = self._split(op.attributes["sharding"], given[0].split)
            return [], [Placement(given[0].host, split)]
        operands = list(zip(given, map(_shape, op.operands), strict=True))
        return [], [follow(operands, _shape(result)) for result in op.results]

    def _manual(
        self, op: ir.Operation, bound: Bound, given: Sequence[Placement], known: Known, local: bool
    ) -> Seen:
        """Return the copies of a shard_map; over all axes its shapes are those of one device."""
        named: Any = sdy.ManualAxesAttr(op.attributes["manual_axes"])
        manual = {str(axis) for axis in named}
        free = [
            n for mesh in self.module.meshes.values() for a, n in mesh.items() if a not in manual
        ]
        local = local or max(free, default=1) == 1
        (block,) = op.regions[0].blocks
        inner = [_shape(v) for v in block.arguments]
        pairs = zip(given, map(_shape, op.operands), inner, strict=True)
        inside = [Placement(x.host, entered(x.split, a, b)) for x, a, b in pairs]
        found, results = self._region(op.regions[0], bound, inside, known, local)
        *_, last = block.operations
        inner = [_shape(v) for v in last.operands]
        pairs = zip(results, inner, map(_shape, op.results), strict=True)
        return found, [Placement(x.host, left(x.split, a, b)) for x, a, b in pairs]

    def _placed(self, op: ir.Operation, lies: Placement, local: bool) -> Seen:
        attributes = ir.DictAttr(op.attributes["mhlo.frontend_attributes"])
        to_host = ir.StringAttr(attributes["_xla_buffer_placement"]).value in HOST
        type_ = ir.RankedTensorType(op.results[0].type)
        shape = tuple(type_.shape)
        here = Placement(lies.host, (1,) * len(shape)) if local else lies
        there, found = here.copied(to_host, dtype_of(type_.element_type), shape)
        return found, [there]

    def _loop(
        self, op: ir.Operation, bound: Bound, given: Sequence[Placement], known: Known, local: bool
    ) -> Seen:
        """Return a loop's copies; where a value lies that goes round, all rounds together say."""
        condition, body = op.regions
        lies = list(given)
        while True:  # the first round may put on the host what enters as zeros
            found, after = self._region(body, bound, lies, known, local)
            before, lies = lies, [_any(pair) for pair in zip(lies, after, strict=True)]
            if lies == before:
                break
        tested, _ = self._region(condition, bound, lies, known, local)
        return hlo.loop(trips(op, bound), found, tested), lies

    def _branches(self, op: ir.Operation, bound: Bound, known: Known, local: bool) -> Seen:
        seen = [self._region(region, bound, (), known, local) for region in op.regions]
        results = [list(column) for column in zip(*(lies for _, lies in seen), strict=True)]
        joined = [_any(column) for column in results]
        return hlo.heaviest([found for found, _ in seen]), joined


def _any(lies: Sequence[Placement]) -> Placement:
    return Placement(any(x.host for x in lies), next((x.split for x in lies if x.split), None))


def _target(op: ir.Operation) -> str:
    return ir.StringAttr(op.attributes["call_target_name"]).value


def _shape(value: ir.Value) -> Shape:
    if not isinstance(value.type, ir.RankedTensorType):
        return ()
    return tuple(ir.RankedTensorType(value.type).shape)
