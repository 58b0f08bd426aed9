"""A function whose backward pass finds part of what it needs in host memory.

The pullback of `jax.vjp` is a tree of arrays. Those that follow from weights alone (casts, gathers)
are made again; of the others some go to the host as soon as they are made, and come back when the
gradient of the function's result is there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Var

from hfjax.parallel.fetch import Stored
from hfjax.parallel.memory import to_device, to_host
from hfjax.parallel.offload import Cut, Share, Tensor
from hfjax.parallel.program import Piece, Residuals, bytes_of, piece

# What hands a tensor on in another form: the one that made it is further back.
_SAME = (
    "reshape",
    "transpose",
    "squeeze",
    "expand_dims",
    "copy",
    "convert_element_type",
    "pvary",
    "pcast",
    "name",
    "sharding_constraint",
    "reduce_precision",
    "optimization_barrier",
)

Choose = Callable[[Sequence[Tensor]], Share]


def kept(function: Callable, choose: Choose, barrier: bool = True) -> Callable:
    """Return `function(known, weights, x) -> (y, aux)`, parts of what it keeps on the host.

    It is differentiated with respect to weights and x. `choose` is told the tensors that depend on
    x and are needed for the backward pass. Outside of loops a barrier keeps XLA from dropping the
    round trip and from merging what is made again with what it was made from.
    """

    @jax.custom_vjp
    def run(known, weights, x):
        return function(known, weights, x)

    def forward(known, weights, x):
        passes = _Passes(function, (known, weights, x), choose)
        out, stash = passes.forward()
        return out, _Waiting(passes.sent(stash, barrier), passes.constants, known, weights, passes)

    def backward(waiting, cotangents):
        held = waiting.stash, waiting.constants, waiting.known, waiting.weights
        dy = cotangents[0]
        if barrier:
            held, dy = lax.optimization_barrier((held, dy))
        gradients, dx = waiting.passes.backward(*held, dy)
        return None, gradients, dx

    run.defvjp(forward, backward)
    return run


def kept_by_slots(function: Callable, choose: Choose, barrier: bool) -> Callable:
    """Return `function(parameters, variables, x) -> (y, aux)`, parts of what it keeps on the host.

    The gradients are those of the slots of stored parameters; their values are known.
    """

    def apply(parameters, variables, x):
        is_stored = lambda leaf: isinstance(leaf, Stored)
        stored, form = jax.tree.flatten(parameters, is_leaf=is_stored)
        slots = [p.slot for p in stored]
        values = [replace(p, slot=None) for p in stored]

        def run(known, slots, x):
            values, variables = known
            joined = [replace(p, slot=slot) for p, slot in zip(values, slots, strict=True)]
            return function(form.unflatten(joined), variables, x)

        return kept(run, choose, barrier)((values, variables), slots, x)

    return apply


def may_cut() -> bool:
    """Return whether a tensor can be cut without communication: on a device by itself."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = set(getattr(mesh, "manual_axes", ()))
    return bool(manual) and all(n == 1 for axis, n in mesh.shape.items() if axis not in manual)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["stash", "constants", "known", "weights"],
    meta_fields=["passes"],
)
@dataclass
class _Waiting:
    """What waits for the backward pass."""

    stash: list[tuple]  # (whole,) or (first part, rest) of each tensor
    constants: list
    known: Any
    weights: Any
    passes: "_Passes"


class _Passes:
    """The two passes of a function, traced for arguments like these."""

    def __init__(self, function: Callable, arguments: tuple, choose: Choose):
        self.arrays, self.form = jax.tree.flatten(arguments)
        self.pullback: Any = None
        self.out: Any = None
        count = len(self.arrays) - len(jax.tree.leaves(arguments[-1]))

        def whole(*arrays):
            known, weights, x = self.form.unflatten(arrays)
            run = lambda weights, x: function(known, weights, x)
            y, pullback, aux = jax.vjp(run, weights, x, has_aux=True)
            kept, self.pullback = jax.tree.flatten(pullback)
            out, self.out = jax.tree.flatten((y, aux))
            return *out, *kept

        program = piece(whole, *self.arrays)
        n_out = self.out.num_leaves
        self.outputs, kept = program.outputs[:n_out], program.outputs[n_out:]
        self.residuals = Residuals(program, kept, count)
        self.ahead = program.part([*self.outputs, *self.residuals.stashed])
        self.constants = list(program.constants.values())
        self.tensors = _tensors(program, self.residuals.stashed)
        self.share = choose(self.tensors)

    def forward(self) -> tuple[Any, list]:
        """Return the results of the function, and what depends on x and is kept."""
        found = self.ahead(*self.arrays)
        return self.out.unflatten(found[: len(self.outputs)]), found[len(self.outputs) :]

    def sent(self, stash: list, barrier: bool) -> list[tuple]:
        """Return what is kept, parts of it on the host."""
        return [_send(x, self.share.get(i), barrier) for i, x in enumerate(stash)]

    def backward(self, stash: list, constants: list, known: Any, weights: Any, dy: Any) -> Any:
        """Return the gradients of weights and x."""
        arrays = jax.tree.leaves((known, weights))
        values = [_fetch(parts, self.share.get(i)) for i, parts in enumerate(stash)]
        pullback = self.pullback.unflatten(self.residuals.all(arrays, values, constants))
        return pullback(dy)


def _send(x: jax.Array, cut: Cut | None, barrier: bool) -> tuple:
    if cut is None:
        return (x,)
    if cut.dim is None:
        return (_held(to_host(x), barrier),)
    first = lax.slice_in_dim(x, 0, cut.count, axis=cut.dim)
    return _held(to_host(first), barrier), lax.slice_in_dim(x, cut.count, None, axis=cut.dim)


def _held(x: jax.Array, barrier: bool) -> jax.Array:
    return lax.optimization_barrier(x) if barrier else x


def _fetch(parts: tuple, cut: Cut | None) -> jax.Array:
    """Return the tensor on the device; XLA would fuse the halves of one into reads of the host."""
    whole = to_device(parts)
    if len(whole) == 1:
        return whole[0]
    assert cut is not None
    return lax.optimization_barrier(jnp.concatenate(whole, axis=cut.dim))


def _tensors(program: Piece, stashed: Sequence[Var]) -> list[Tensor]:
    """Return a description of each tensor that is kept."""
    makes = {v: e for e in program.equations for v in e.outvars}
    names = _names(program)
    return [_tensor(v, makes, names) for v in stashed]


def _tensor(v: Var, makes: Mapping, names: Mapping[Var, set[str]]) -> Tensor:
    back, named = v, set(names.get(v, ()))
    while back in makes and makes[back].primitive.name in _SAME:
        back = makes[back].invars[0]
        named |= names.get(back, set())
    what = makes[back].primitive.name if back in makes else "input"
    aval: Any = v.aval
    return Tensor(what, aval.shape, str(aval.dtype), bytes_of([aval]), frozenset(named))


def _names(program: Piece) -> dict[Var, set[str]]:
    """Return the names that tensors were given by `checkpoint_name`, before and after it."""
    names: dict[Var, set[str]] = {}
    for equation in program.equations:
        if equation.primitive.name == "name":
            for v in (*equation.invars, *equation.outvars):
                if isinstance(v, Var):
                    names.setdefault(v, set()).add(equation.params["name"])
    return names
