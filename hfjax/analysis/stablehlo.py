"""Reads the collectives of a StableHLO module: what our source wrote, before the partitioner."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy, stablehlo

from hfjax.analysis import hlo as read_hlo
from hfjax.analysis.hlo import KINDS, Transfer

Sizes = Mapping[str, int]  # of a mesh's axes
Bound = tuple[int | None, ...]  # a function's arguments, where they are known integers

_OPS = {f"stablehlo.{name.replace('-', '_')}": kind for name, kind in KINDS.items()}
_COPIES = ("sdy.sharding_constraint", "stablehlo.convert", "stablehlo.optimization_barrier")
_CALLEES = {"func.call": "callee", "stablehlo.composite": "decomposition"}


class Module:
    """A StableHLO module: its meshes, its functions, and a walk over them from main."""

    def __init__(self, module: Any) -> None:
        named = [op.operation for op in module.body.operations if "sym_name" in op.attributes]
        self.symbols = {ir.StringAttr(op.attributes["sym_name"]).value: op for op in named}
        self.meshes = {n: _sizes(op) for n, op in self.symbols.items() if op.name == "sdy.mesh"}
        self.walked: dict[tuple[str, Bound], list[Transfer]] = {}

    def transfers(self) -> list[Transfer]:
        """Returns the transfers of one call of the public main function."""
        return self.call("main", (None,) * len(self.symbols["main"].regions[0].blocks[0].arguments))

    def call(self, name: str, bound: Bound) -> list[Transfer]:
        """Returns the transfers of one call of a function with these known integers."""
        if (name, bound) not in self.walked:
            self.walked[name, bound] = self.region(self.symbols[name].regions[0], bound)
        return self.walked[name, bound]

    def region(self, region: ir.Region, bound: Bound) -> list[Transfer]:
        """Returns the transfers of one run through a region."""
        ops = [op.operation for block in region.blocks for op in block.operations]
        return [t for op in ops for t in self.visit(op, bound)]

    def visit(self, op: ir.Operation, bound: Bound) -> list[Transfer]:
        """Returns the transfers of an operation and of all that it calls or contains."""
        if op.name in _OPS:
            return self.collective(op)
        if op.name in _CALLEES:
            callee = ir.FlatSymbolRefAttr(op.attributes[_CALLEES[op.name]]).value
            return self.call(callee, tuple(integer(value, bound) for value in op.operands))
        inner = [self.region(region, bound) for region in op.regions]
        if op.name == "stablehlo.while":
            return read_hlo.loop(trips(op, bound), inner[1], inner[0])
        if op.name in ("stablehlo.case", "stablehlo.if"):
            return read_hlo.heaviest_branch(inner)
        return [t for region_transfers in inner for t in region_transfers]

    def collective(self, op: ir.Operation) -> list[Transfer]:
        """Returns the transfers of one collective, an entry per operand."""
        kind = _OPS[op.name]
        groups = read_hlo.active_groups(kind, self.groups(op))
        larger = op.results if kind == "all-gather" else op.operands
        types = [ir.RankedTensorType(value.type) for value in larger]
        payloads = [(dtype_of(t.element_type), tuple(t.shape)) for t in types]
        return [Transfer(kind, groups, *payload) for payload in payloads if groups]

    def groups(self, op: ir.Operation) -> Iterable[Iterable[int]]:
        """Returns device groups from a table of ids or, in newer jax, from the mesh's axes."""
        permute = op.name == "stablehlo.collective_permute"
        groups = op.attributes["source_target_pairs" if permute else "replica_groups"]
        if isinstance(groups, ir.DenseIntElementsAttr):
            return np.array(groups).tolist()
        groups = stablehlo.ReplicaGroupMeshAxesAttr(groups)
        mesh = self.meshes[ir.FlatSymbolRefAttr(groups.mesh).value]
        named = map(stablehlo.AxisRefAttr, ir.ArrayAttr(groups.axes))
        axes = [(a.name, *_sub_axis(a.sub_axis_info, mesh[a.name])) for a in named]
        return read_hlo.mesh_groups(mesh, axes)


def _sizes(op: ir.Operation) -> Sizes:
    axes = map(sdy.MeshAxisAttr, sdy.MeshAttr(op.attributes["mesh"]).axes)
    return {axis.name: axis.size for axis in axes}


def _sub_axis(info: Any, size: int) -> tuple[int, int]:
    """Returns (pre, size) of the part of an axis that an axis_ref means: mostly all of it."""
    return (1, size) if info is None else (info.pre_size, info.size)


def dtype_of(element: ir.Type) -> str:
    """Returns jax's name of an MLIR element type: float32 for f32, int8 for i8, bool for i1."""
    text = str(element).lower()
    hlo = {"i1": "pred", "complex<f32>": "c64", "complex<f64>": "c128"}
    signless = text.replace("ui", "u") if text.startswith("u") else text.replace("i", "s", 1)
    return read_hlo.dtype_name(hlo.get(text, signless))


# A loop of jax counts up: `while (i < bound) { …; i = i + step }` with i from a constant. The three
# constants may stand anywhere outside, or come in as loop arguments or function arguments.


def trips(loop: ir.Operation, bound: Bound) -> int | None:
    """Returns how often a while runs its body, None if that cannot be read from its constants."""
    condition, body = (region.blocks[0].operations[-1].operands for region in loop.regions)
    compare = defining_op(condition[0])
    if compare is None or compare.name != "stablehlo.compare":
        return None
    counter, last = _original(compare.operands[0]), integer(compare.operands[1], bound)
    if defining_op(counter) or ir.BlockArgument(counter).owner.owner.operation != loop:
        return None
    index = ir.BlockArgument(counter).arg_number
    first, step = integer(loop.operands[index], bound), _step(body[index], index, bound)
    if first is None or last is None or step is None:
        return None
    direction = stablehlo.ComparisonDirectionAttr(compare.attributes["comparison_direction"]).value
    directions = {"LT": (1, last), "LE": (1, last + 1), "GT": (-1, last), "GE": (-1, last - 1)}
    sign, stop = directions.get(direction, (0, 0))
    return len(range(first, stop, step)) if sign * step > 0 else None


def _step(after: ir.Value, index: int, bound: Bound) -> int | None:
    """Returns the constant added to loop argument `index` in one run of the body."""
    op = defining_op(after)
    if op is None or op.name not in ("stablehlo.add", "stablehlo.subtract"):
        return None
    before, step = _original(op.operands[0]), integer(op.operands[1], bound)
    if step is None or defining_op(before) or ir.BlockArgument(before).arg_number != index:
        return None
    return step if op.name == "stablehlo.add" else -step


def _original(value: ir.Value) -> ir.Value:
    """Returns the value that this one is a copy of."""
    while not isinstance(value.owner, ir.Block) and value.owner.operation.name in _COPIES:
        value = value.owner.operation.operands[ir.OpResult(value).result_number]
    return value


def defining_op(value: ir.Value) -> ir.Operation | None:
    """Returns the operation that computes a value, None for the argument of a block."""
    owner = _original(value).owner
    return None if isinstance(owner, ir.Block) else owner.operation


def integer(value: ir.Value, bound: Bound) -> int | None:
    """Returns the integer that a scalar always is, None if it is none or not known."""
    value, op = _original(value), defining_op(value)
    type_ = ir.RankedTensorType(value.type) if isinstance(value.type, ir.RankedTensorType) else None
    if type_ is None or type_.rank or not isinstance(type_.element_type, ir.IntegerType):
        return None
    if op is None:
        return _argument(ir.BlockArgument(value), bound)
    constant = op.attributes["value"] if op.name == "stablehlo.constant" else None
    return int(constant[0]) if isinstance(constant, ir.DenseIntElementsAttr) else None


def _argument(argument: ir.BlockArgument, bound: Bound) -> int | None:
    """Returns the integer that a block's argument always is: as bound, or as it entered a loop."""
    op, index = argument.owner.owner.operation, argument.arg_number
    if op.name == "func.func":
        return bound[index]
    if op.name == "sdy.manual_computation":
        return integer(op.operands[index], bound)
    if op.name != "stablehlo.while":
        return None
    body = op.regions[1].blocks[0]
    unchanged = _original(body.operations[-1].operands[index]) == body.arguments[index]
    return integer(op.operands[index], bound) if unchanged else None
