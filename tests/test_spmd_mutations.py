"""The tests of programs in parts find a rule that is wrong: each is made wrong once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from hfjax.parallel.spmd import interpreter, partition_context
from hfjax.parallel.spmd.placements import AxisGroup, LazyValue, PartialValue, ShardedValue
from hfjax.parallel.spmd.rules import control_flow, custom_derivatives, reductions
from tests.compare_programs import ROWS, by_vmap, compare, parts
from tests.random_programs import generated
from tests.random_scans import judged, seeds_of
from tests.typical_losses import TYPICAL, named

N = 4


def found_wrong(*programs):
    """Return how many of these programs differ from one device, or fail."""
    with jax.enable_x64(True):
        return sum(bool(f.wrong) for f in compare([make() for make in programs], N))


def typical(*names):
    return [functools.partial(named, name) for name in names]


# -- mistakes that are easily made ----------------------------------------------------------------


def not_divided(patch):
    patch.setattr(AxisGroup, "as_partial", lambda self, x: x)


def not_completed(patch):
    patch.setattr(partition_context.PartitionContext, "_all_reduce", lambda self, value: value.x)


def cotangents_are_the_same(patch):
    patch.setattr(custom_derivatives, "cotangent_placement", lambda kind: kind)


def rows_are_numbered_anew(patch):
    numbers = lambda self, size, outer, dtype="int32": jax.lax.iota(dtype, size // self.size)
    patch.setattr(AxisGroup, "global_indices", numbers)


def parts_are_the_first(patch):
    patch.setattr(AxisGroup, "axis_index", property(lambda self: jnp.int32(0)))


def greatest_of_own_rows(patch):
    patch.setattr(AxisGroup, "all_reduce_max", lambda self, x: x)


def ties_of_own_rows(patch):
    """The derivative of the greatest of each device's rows, in place of a rule for all."""

    def rule(scope, equation, value):
        local = scope.bind(equation, [value.x])[0]
        most = scope.group.all_reduce_max(jax.lax.stop_gradient(local))
        ours = (local == most).astype(local.dtype)
        return most + scope.group.all_reduce(ours * (local - jax.lax.stop_gradient(local)))

    patch.setitem(reductions._CROSS_DEVICE, "reduce_max", ("greatest", rule))


def blocks_are_forgotten(patch):
    joined = AxisGroup.all_gather
    patch.setattr(AxisGroup, "all_gather", lambda self, x, cut: joined(self, x, type(cut)(cut.dim)))


MISTAKES = {
    "a total is not divided by the devices": (not_divided, ["linear_regression"]),
    "a sum is read before it is complete": (not_completed, ["masked_tokens", "batch_norm"]),
    "a cotangent is not completed": (
        cotangents_are_the_same,
        ["gradient_of_length_one", "gradient_clipped_by_its_norm"],
    ),
    "rows are numbered anew on each device": (rows_are_numbered_anew, ["clip_contrastive"]),
    "every device takes the first rows": (parts_are_the_first, ["dropout", "in_batch_softmax"]),
    "a maximum is that of own rows": (greatest_of_own_rows, ["range_of_activations"]),
    "ties are counted on own rows": (ties_of_own_rows, ["ties_at_the_maximum"]),
    "blocks of a dimension are forgotten": (blocks_are_forgotten, ["simclr"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_by_what_people_write(mistake, monkeypatch):
    make, names = MISTAKES[mistake]
    make(monkeypatch)
    assert found_wrong(*typical(*names))


# -- every rule -----------------------------------------------------------------------------------


def spoiled(value):
    """Return a value that is another."""
    if isinstance(value, ShardedValue | PartialValue):
        return dataclasses.replace(value, x=spoiled(value.x))
    if isinstance(value, LazyValue):
        make = value.make
        return dataclasses.replace(value, make=lambda scope, cut: spoiled(make(scope, cut)))
    if not hasattr(value, "dtype") or jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    if value.dtype == jnp.bool_:
        return ~value
    return value * 3 + 5  # also of the bits of a random number


def reached():
    """Return, for each rule, programs of which it runs on what is not the same everywhere.

    Programs that loop until something holds are left out: with a spoiled rule they may never end.
    """
    found, loop = {}, set()

    def noting(name, rule, program):
        def run(scope, equation, values):
            if name == "while":
                loop.add(program)
            results = rule(scope, equation, values)
            if results is not None and any(
                isinstance(v, ShardedValue | PartialValue | LazyValue) for v in results
            ):
                found.setdefault(name, {})[program] = None
            return results

        return run

    programs = [functools.partial(generated, seed) for seed in range(80)]
    for make in (*typical(*sorted(TYPICAL)), *programs):
        program = make()
        with pytest.MonkeyPatch.context() as patch:
            for name, rule in interpreter.RULES.items():
                patch.setitem(interpreter.RULES, name, noting(name, rule, make))
            try:
                run = by_vmap(program, N)
                jax.eval_shape(run, program.weights, parts(program.batch, ROWS.side(N)))
            except NotImplementedError:  # JAX itself cannot vmap a ragged product
                continue
    return {
        name: [make for make in by if name == "while" or make not in loop]
        for name, by in found.items()
    }


# logsumexp asks whether its maximum is finite, and what it takes in its place cancels.
NEUTRAL = {"is_finite"}


@pytest.mark.slow
def test_every_rule_that_is_spoiled_is_found():
    with jax.enable_x64(True):
        programs = reached()
    missed = []
    for name, by in programs.items():
        if not by:
            continue
        rule = interpreter.RULES[name]
        with pytest.MonkeyPatch.context() as patch:
            wrong = lambda *given, rule=rule: [spoiled(v) for v in rule(*given) or ()] or None
            patch.setitem(interpreter.RULES, name, wrong)
            if not any(map(found_wrong, by[:5])):
                missed.append(name)
    unreached = sorted(interpreter.RULES.keys() - programs.keys())
    print(f"{len(programs)} rules are found; no program reaches {', '.join(unreached)}")
    assert set(missed) <= NEUTRAL, missed


# -- sums that a loop over rows carries -----------------------------------------------------------


def keeps(name, rule):
    """Let an operation keep the sums that it is given, by this rule."""
    return lambda patch: patch.setitem(control_flow._MARK_RULES, name, rule)


def results_are_not_looked_at(patch):
    are_sums = control_flow._are_accumulators
    patch.setattr(
        control_flow, "_are_accumulators", lambda found, stays: are_sums(found[: len(stays)], stays)
    )


def sums_may_change_places(patch):
    are_sums = control_flow._are_accumulators
    patch.setattr(
        control_flow, "_are_accumulators", lambda found, stays: are_sums(sorted_sums(found), stays)
    )


def sorted_sums(found):
    """Return marks with those of sums in the order of their numbers, as many as there are."""
    numbers = iter(sorted(mark for mark in found if mark is not None))
    return [mark if mark is None else next(numbers) for mark in found]


first_of = lambda equation, marks: [next(m for m in marks if m is not None)]
# Mistakes, and what is in the bodies that show them.
OF_SUMS = {
    "what reads a sum is not looked at": (
        lambda patch: patch.setattr(control_flow, "MIXED", None),
        ["read", "read inside", "in a sum"],
    ),
    "what a turn returns is not looked at": (results_are_not_looked_at, ["return"]),
    "sums may change places": (sums_may_change_places, ["exchange"]),
    "two sums are one": (keeps("add", first_of), ["mixed"]),
    "what a sum is taken from is a sum": (keeps("sub", first_of), ["mixed"]),
    "a sum may be rounded": (keeps("convert_element_type", first_of), ["mixed"]),
    "a sum may be multiplied": (keeps("mul", first_of), ["mixed"]),
    "a loop in the body runs once": (keeps("scan", control_flow._mark_body), ["mixed"]),
}


@pytest.mark.parametrize("mistake", OF_SUMS)
def test_a_mistake_in_the_rule_of_sums_that_a_loop_carries_is_found(mistake, monkeypatch):
    make, faults = OF_SUMS[mistake]
    make(monkeypatch)
    with jax.enable_x64(True):
        for fault in faults:
            assert any(alone and against for alone, against in map(judged, seeds_of(fault))), fault
