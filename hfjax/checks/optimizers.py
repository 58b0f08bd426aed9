"""Whether an optimizer works entry by entry: on a part, in packed rows, beside padding.

It is decided from the optimizer's own program, for arrays as they are and in that form: an update
consists of the same terms in both, and entries interact along no dimension in which the forms
differ.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.checks.feature_conflicts import error_of
from hfjax.checks.features import NOT_ELEMENT_BY_ELEMENT
from hfjax.checks.optimizer_program import NONE, Entries, OptimizerProgram, Terms
from hfjax.optimizer_step.optimizer_parts import COUNT, NUMBER, OptimizerParts
from hfjax.optimizers.transforms import FrozenLayers, unwrap
from hfjax.parallel.adapters.model_template import LAYERS
from hfjax.parallel.execution import Execution
from hfjax.parallel.mesh import EXPERTS
from hfjax.parallel.packing import PackedLayers
from hfjax.sharding.layout import Layout
from hfjax.sharding.optimizer_state import convert_layers, convert_state
from hfjax.sharding.storage import StackedLayers
from hfjax.utils.paths import Flat, nest


@dataclass(frozen=True)
class _Variant:
    """Another form of a model's parameters.

    Attributes:
        shapes: Path in the form -> shape and dtype.
        entries: Path in the form -> whose entries it has.
        arrays: Path -> where it is in the form; only those to compare.
        dims: Path -> dimensions along which the form has other entries.
        is_padded: Whether the form has more entries, which are 0; its state begins in that form.
        is_mixed: Whether entries are rearranged: numbers in the state may depend on totals only.
    """

    shapes: Flat
    entries: Mapping[str, Entries]
    arrays: Mapping[str, Sequence[str]]
    dims: Mapping[str, Sequence[int]]
    is_padded: bool = False
    is_mixed: bool = False


class _DependsError(Exception):
    """What an update of a part depends on outside of it."""


class _ReferenceProgram:
    """An optimizer's program for parameters as they are: the reference for other forms."""

    def __init__(
        self, optimizer: Any, shapes: Flat, entries: Mapping[str, Entries], padded: Entries = NONE
    ) -> None:
        self._optimizer, self._shapes, self._terms = optimizer, shapes, Terms()
        try:
            self.program = OptimizerProgram(optimizer, shapes, entries, self._terms, padded)
        except Exception as error:
            raise ValueError(
                "the optimizer cannot be traced with gradients, its state and parameters alone: "
                f"{type(error).__name__}: {error}"
            ) from error

    def find_difference(self, variant: _Variant) -> str | None:
        """Return a parameter that the optimizer updates differently in a form."""
        reference, is_mixed = self.program, dict[Any, bool]()
        other = OptimizerProgram(self._optimizer, variant.shapes, variant.entries, self._terms)

        def is_same(path: str) -> bool:
            terms, shape = (
                _terms(reference.values_of(path, variant.is_padded)),
                self._shapes[path].shape,
            )
            if not reference.uses_own_entries(path) or any(
                _terms(other.values_of(p, variant.is_padded)) != terms for p in variant.arrays[path]
            ):
                return False
            dims = variant.dims.get(path, ())
            if (
                variant.is_padded
                and any(shape[d] == 1 for d in dims)
                and not reference.is_elementwise(path)
            ):
                return False
            for dim in dims:
                if (key := (*terms, shape, dim)) not in is_mixed and shape[dim] > 1:
                    is_mixed[key] = reference.mixes_entries(path, dim)
            return not any(is_mixed.get((*terms, shape, dim)) for dim in dims)

        path = next((path for path in variant.arrays if not is_same(path)), None)
        variant_terms = {
            name: _terms(values) for name, values in other.numbers(variant.is_padded).items()
        }
        has_other_numbers = any(
            variant_terms.get(name, _terms(values)) != _terms(values)
            or (variant.is_mixed and values[0].entries)
            for name, values in reference.numbers(variant.is_padded).items()
        )
        if path is None and (
            has_other_numbers or (variant.is_padded and reference.depends_on_zeros())
        ):
            path = next(iter(variant.arrays), None)
        return path


def _terms(values: Sequence[Any]) -> list[int]:
    return [v.term for v in values]


# -- on a part of the parameters ----------------------------------------------------------


def check_element_by_element(
    layout: Layout,
    feature: str = "asynchronous schedule",
    feature_text: str = "an asynchronous schedule",
    with_pieces: bool = False,
) -> None:
    """Refuse an optimizer whose update of a part is not that part of its update of all.

    It may keep arrays like the parameters, and numbers that do not depend on gradients. `feature`
    updates part after part, `feature_text` is how the user wrote it. `with_pieces`: parts are also
    shards of a layer's arrays, as devices have them.
    """
    if any(p.frozen_layers for p in layout.param_specs.values()):
        optimizer_text = "layout.freeze(…, first=…), which tells one layer from another,"
        raise error_of((NOT_ELEMENT_BY_ELEMENT, feature), optimizer_text, feature_text)
    variants = _variants(layout)
    if layout.template.is_layer_list:
        del variants["a layer"]
    elif not with_pieces:
        del variants["a piece of a layer"]
    try:
        _check_variants(OptimizerParts(layout), variants)
    except _DependsError as error:
        raise error_of(
            (NOT_ELEMENT_BY_ELEMENT, feature), f"an optimizer that {error},", feature_text
        ) from error


def _halves(path: str) -> Entries:
    """Return the entries of a part of a parameter, and the others."""
    return frozenset((path, f"{path} beyond"))


def _subset_variant(
    layout: Layout, is_of_layers: bool, slice_shape: Callable | None, dims_of: Callable
) -> _Variant:
    """Return the form in which only layers (or only what is outside of them) have entries."""
    own_paths = [path for path in layout.param_specs if path.startswith(LAYERS) == is_of_layers]
    shape_of_part = slice_shape or (lambda shape_of: shape_of)
    shape_of = lambda path, x: (
        shape_of_part(x.shape) if path in own_paths else (*(0,)[: len(x.shape)], *x.shape[1:])
    )
    entries_of = lambda path: frozenset((path,)) if slice_shape else _halves(path)
    return _Variant(
        {
            path: jax.ShapeDtypeStruct(shape_of(path, x), x.dtype)
            for path, x in layout.param_specs.items()
        },
        {path: entries_of(path) if path in own_paths else NONE for path in layout.param_specs},
        {path: (path,) for path in own_paths},
        {path: dims_of(layout.param_specs[path].shape) for path in own_paths},
    )


def _variants(layout: Layout) -> dict[str, _Variant]:
    all_dims = lambda shape: range(len(shape))
    return {
        "a layer": _subset_variant(layout, True, lambda shape: (1, *shape[1:]), lambda shape: (0,)),
        "a piece of a layer": _subset_variant(
            layout, True, lambda shape: (1,) * len(shape), all_dims
        ),
        "the ends": _subset_variant(layout, False, None, lambda shape: ()),
    }


def _check_variants(parts: OptimizerParts, variants: Mapping[str, _Variant]) -> None:
    for name, (_, leaf) in parts.leaves.items():
        is_number = leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.number)
        if parts.roles[name] in (COUNT, NUMBER) and not is_number:
            description = f"{leaf.dtype}{list(leaf.shape)}"
            raise _DependsError(
                f"keeps {name} {description}, neither like a parameter nor a number"
            )
    param_specs = parts.layout.param_specs
    reference = _ReferenceProgram(
        parts.layout.optimizer, dict(param_specs), {p: _halves(p) for p in param_specs}
    )
    _check_numbers(parts, reference.program)
    for description, variant in variants.items():
        try:
            path = reference.find_difference(variant)
        except Exception as error:
            raise _DependsError("cannot be given a part of the parameters") from error
        if path is not None:
            raise _DependsError(f"updates {path} otherwise if it is given {description} alone")


def _check_numbers(parts: OptimizerParts, program: OptimizerProgram) -> None:
    """Refuse a number that depends on gradients, and one beside moments that is no count.

    A count may start anywhere: that of embedding and head differs from that of the layers.
    """
    for name, (_, leaf) in parts.leaves.items():
        if parts.roles[name] not in (COUNT, NUMBER):
            continue
        if program.state[name].is_dependent:
            raise _DependsError(f"keeps {name}, a number that depends on the gradients")
        if parts.roles[name] == COUNT and not program.is_counter(name, leaf):
            raise _DependsError(f"keeps {name}, which is neither constant nor a count of updates")


# -- packed rows and padding --------------------------------------------------------------


def check_packed_rows(layout: Layout) -> None:
    """Refuse an optimizer that would update packed rows differently from parameters."""
    if (packed := layout.storage.packed) is None:
        return
    shapes = {
        path: jax.ShapeDtypeStruct(v.shape, v.dtype)
        for path, v in layout.template.parameters.items()
    }
    try:
        jax.eval_shape(partial(_packed_state, layout.optimizer, packed), shapes)
        entries = {path: frozenset((path,)) for path in shapes}
        padded = NONE.union(*(entries[path] for path in packed.locations))
        path = _ReferenceProgram(layout.optimizer, shapes, entries, padded).find_difference(
            _packed_variant(packed, shapes)
        )
    except Exception as error:
        raise _packing_error(f"its state cannot be packed ({error})") from error
    if path is not None:
        raise _packing_error(f"it moves {path} otherwise than by itself")


def _packed_variant(packed: PackedLayers, shapes: Flat) -> _Variant:
    entries = {path: frozenset((path,)) for path in shapes}
    arrays = {path: (location.array,) for path, location in packed.locations.items()}
    unpacked = {path: x for path, x in shapes.items() if path not in arrays}
    packed_entries = {
        name: NONE.union(*(entries[p] for p in arrays if name in arrays[p]))
        for name in packed.shapes
    }
    dims = {path: range(len(shapes[path].shape)) for path in arrays}
    all_entries = packed_entries | {path: entries[path] for path in unpacked}
    return _Variant(
        unpacked | packed.shapes, all_entries, arrays, dims, is_padded=True, is_mixed=True
    )


def _packed_state(optimizer: Any, packed: PackedLayers, flat: Flat) -> Any:
    """Return the optimizer state for these parameters, packed."""
    pack = partial(convert_layers, None, packed)
    packed_params = pack(flat)
    state_shapes = jax.eval_shape(optimizer.init, nest(packed_params))
    shapes = [{path: x.shape for path, x in params.items()} for params in (flat, packed_params)]
    return convert_state(optimizer.init(nest(flat)), shapes[0], state_shapes, shapes[1], pack)


def _packing_error(why: str) -> ValueError:
    optimizer_text = f"an optimizer that does not work element by element ({why})"
    return error_of(
        ("list of layers", NOT_ELEMENT_BY_ELEMENT), "a pipeline of unlike layers", optimizer_text
    )


def check_padding(layout: Layout) -> None:
    """Refuse an optimizer for which the padding of stacked layers makes a difference."""
    storage = layout.storage
    if not isinstance(storage, StackedLayers) or (storage.arrangement.stored_order >= 0).all():
        return
    model_specs, param_specs = dict(layout.model_layout.param_specs), dict(layout.param_specs)
    stacked = [path for path, p in layout.param_specs.items() if p.stacked]
    entries = {path: frozenset((path,)) for path in model_specs}
    padded, dims = NONE.union(*(entries[path] for path in stacked)), dict.fromkeys(stacked, (0,))
    variant = _Variant(
        param_specs,
        entries,
        {path: (path,) for path in model_specs},
        dims,
        is_padded=True,
        is_mixed=True,
    )
    path = _ReferenceProgram(
        unwrap(layout.optimizer, FrozenLayers), model_specs, entries, padded
    ).find_difference(variant)
    if path is not None:
        optimizer_text = f"an optimizer that moves {path} otherwise beside empty places,"
        num_layers, num_stored = storage.arrangement.layers, storage.arrangement.stored_order.size
        stages = f"a schedule ({num_layers} layers are padded to {num_stored} rows)"
        raise error_of((NOT_ELEMENT_BY_ELEMENT, "schedule"), optimizer_text, stages)


def warn_of_mixed_experts(layout: Layout) -> None:
    """Warn of an optimizer that does not treat the experts of one array independently."""
    expert_dims = {
        path: p.axes.index(EXPERTS)
        for path, p in layout.param_specs.items()
        if EXPERTS in p.axes and not p.frozen
    }
    if not expert_dims or any(
        layout.param_specs[path].shape[dim] < 2 for path, dim in expert_dims.items()
    ):
        return
    try:
        variant = _two_expert_variant(layout, expert_dims)
        entries = {
            path: frozenset(variant.arrays.get(path, (path,))) for path in layout.param_specs
        }
        path = _ReferenceProgram(
            layout.optimizer, dict(layout.param_specs), entries
        ).find_difference(variant)
    except Exception:  # it depends on names, or on numbers of dimensions
        return
    if path is not None:
        warnings.warn(
            f"the optimizer treats the experts of {path} as one array (as LAMB, LARS, Adafactor "
            "and Muon do): how far one expert moves depends on the others. Use an optimizer that "
            "works element by element for them (hfjax.optimizers.by_path).",
            UserWarning,
            stacklevel=5,
        )


def _two_expert_variant(layout: Layout, expert_dims: Mapping[str, int]) -> _Variant:
    """Return the form in which two experts stand for all, each an array of its own."""
    expert_paths = {path: [f"{path}/{i}" for i in (0, 1)] for path in expert_dims}
    expert_shape = lambda path, x: jax.ShapeDtypeStruct(
        x.shape[: expert_dims[path]] + x.shape[expert_dims[path] + 1 :], x.dtype
    )
    specs = [
        (path, p, x)
        for path, x in layout.param_specs.items()
        for p in expert_paths.get(path, [path])
    ]
    shapes = {p: expert_shape(path, x) if path in expert_dims else x for path, p, x in specs}
    dims = {path: (dim,) for path, dim in expert_dims.items()}
    return _Variant(shapes, {p: frozenset((p,)) for p in shapes}, expert_paths, dims, is_mixed=True)


# -- what a step calls ---------------------------------------------------------------------


def check_optimizer(layout: Layout, execution: Execution) -> None:
    """Refuse an optimizer for which this step would differ from one device; warn of experts."""
    check_packed_rows(layout)
    check_padding(layout)
    warn_of_mixed_experts(layout)
    if execution.optimizer_in_backward:
        with_pieces = any(
            p.split_dims("optimizer_state") or p.sharded_compute
            for p in layout.param_specs.values()
        )
        feature_text = "optimizer_in_backward=True"
        check_element_by_element(layout, "optimizer_in_backward", feature_text, with_pieces)
    elif execution.schedule is not None and execution.schedule.asynchronous:
        check_element_by_element(layout)


def has_layerwise_update(layout: Layout) -> bool:
    """Return whether the optimizer updates each layer independently of the others."""
    try:
        check_element_by_element(layout)
    except ValueError:
        return False
    return True
