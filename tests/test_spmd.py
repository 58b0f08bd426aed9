"""Programs over a whole batch, run on parts of its rows, give what one device gives."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfjax.parallel.spmd.interpreter import run_partitioned
from hfjax.parallel.spmd.placements import AxisGroup, PartialValue, ShardedValue, Split
from hfjax.parallel.spmd.rule_calls import per_device
from tests.compare_programs import POSITIONS, Dealt, by_shard_map, by_two_sides, compare, whole
from tests.random_axis_groups import SIDES
from tests.random_programs import generated, of_steps
from tests.random_scans import FAULTS, judged, scans
from tests.rules_page import table
from tests.typical_losses import SIZES, TYPICAL, named
from tests.typical_sequence_programs import PROGRAMS

SLOW = pytest.mark.slow
AT_ONCE = 10  # programs of one compilation
BLOCK, SHORT = 100, 15  # programs of one test; of `make test`
FAST, ALL = 300, 5_300  # seeds of the short blocks, and of all


def check(programs, n, at_once=AT_ONCE, **how):
    """Assert that programs agree with one device; return those that gathered nothing."""
    found = []
    with jax.enable_x64(True):
        for first in range(0, len(programs), at_once):
            made = [make() for make in programs[first : first + at_once]]
            found += compare(made, n, **how)
    lines = [f"{f.program.name}, {n} devices: {line}" for f in found for line in f.wrong]
    wrong = sum(bool(f.wrong) for f in found)
    assert not lines, f"{wrong} of {len(found)} programs\n" + "\n".join(lines)
    return [f.program.name for f in found if not f.gathers]


def blocks(first, last, n, count=BLOCK):
    """Return parameters of tests: programs, by turns on these numbers of devices."""
    starts = range(first, last, count)
    return [
        pytest.param(at, n[i % len(n)], id=f"{at} on {n[i % len(n)]}")
        for i, at in enumerate(starts)
    ]


def of_block(first, n, record_property, count=BLOCK, make=generated, **how):
    without = check([functools.partial(make, first + i) for i in range(count)], n, **how)
    record_property("programs without a gather", f"{len(without)} of {count}")
    print(f"{len(without)} of {count} programs gather nothing")
    return without


@pytest.mark.parametrize(("first", "n"), blocks(0, FAST, (2, 4), SHORT))
@pytest.mark.short("165 on 4")
def test_programs_drawn_from_seeds_are_as_on_one_device(first, n, record_property):
    """At least two fifths gather nothing."""
    assert len(of_block(first, n, record_property, SHORT)) >= 2 * SHORT / 5


@SLOW
@pytest.mark.parametrize(("first", "n"), blocks(0, FAST, (4, 2)) + blocks(FAST, ALL, (2, 4)))
def test_and_many_more_programs(first, n, record_property):
    of_block(first, n, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FAST, FAST + 40, 10))
def test_rows_in_two_pieces_each_are_as_on_one_device(first):
    check([functools.partial(generated, first + i) for i in range(10)], 2, dealt=FOLDED)


@SLOW
@pytest.mark.parametrize(("first", "n"), blocks(0, FAST, (2, 4)))
def test_and_many_more_in_two_pieces(first, n):
    check([functools.partial(generated, first + i) for i in range(BLOCK)], n, dealt=FOLDED)


FEW = 16  # programs of one side, on each number of devices


def of_side(side, first, n, record_property, count=BLOCK):
    drawn = SIDES[side]
    how = {"devices": drawn.devices, "dealt": drawn.dealt}
    make = functools.partial(drawn.program, n=n)
    return of_block(first, n, record_property, count, make, **how)


@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES)
def test_programs_along_other_sides_are_as_on_one_device(side, record_property):
    """Of those along one side at least half gather nothing."""
    without = [of_side(side, FEW * n, n, record_property, FEW) for n in (2, 3, 4)]
    assert sum(map(len, without)) >= 3 * FEW / 2 or SIDES[side].devices is by_two_sides


@SLOW
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("first", "n"), blocks(100, 1_100, (2, 3, 4)))
def test_and_many_more_along_other_sides(side, first, n, record_property):
    of_side(side, first, n, record_property)


FOLDED = Dealt(folds=True)
# How positions are dealt, with the sizes of the batch and the number of devices.
ALONG = {
    "in order": (Dealt(POSITIONS, False, "positions"), "few", 2),
    "zigzag": (Dealt(POSITIONS, True, "positions"), "few", 2),
    "square": (Dealt(POSITIONS, False, "positions"), "square", 2),
    "long": (Dealt(POSITIONS, True, "positions"), "long", 4),
}
ORDERS = [pytest.param(name, marks=() if name == "zigzag" else SLOW) for name in ALONG]


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("first", range(8))
def test_what_people_write_along_positions_is_as_on_one_device(order, first, record_property):
    dealt, sizes, n = ALONG[order]
    names = sorted(PROGRAMS)[first::8]
    programs = [functools.partial(named, name, sizes, among=PROGRAMS) for name in names]
    without = check(programs, n, dealt=dealt)
    record_property("programs without a gather", f"{len(without)} of {len(names)}")


TYPICAL_TURNS = [pytest.param(turn, marks=() if turn == 0 else SLOW) for turn in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("turn", TYPICAL_TURNS)
@pytest.mark.parametrize("folds", [True, False])
def test_what_people_write_along_rows_holds_along_positions(turn, folds):
    names = sorted(TYPICAL.keys() - ON_MESHES_ONLY)[turn + 4 * folds :: 8]
    dealt = Dealt(POSITIONS, folds, "positions")
    check([functools.partial(named, name, "plain", seed=turn) for name in names], 2, dealt=dealt)


@pytest.mark.slow
@pytest.mark.parametrize("turn", TYPICAL_TURNS)
def test_what_people_write_along_positions_holds_along_rows(turn):
    names = sorted(PROGRAMS)[(turn + 2) % 4 :: 4]
    check([functools.partial(named, name, "square", among=PROGRAMS) for name in names], 2)


def test_a_loop_of_rows_carries_sums_exactly_where_no_turn_sees_one():
    """Its turns then run on each device; else rows are gathered."""
    seeds = range(len(FAULTS) * 4)
    with jax.enable_x64(True):
        for seed, (alone, against) in zip(seeds, map(judged, seeds), strict=True):
            assert alone != bool(against), (seed, against)


# Over rows and positions, however these are dealt, with sizes of the batch and numbers of devices.
OVER = {"rows": ("rows", Dealt(), (8, 4, 3), 4)}
OVER |= {name: ("positions", dealt, (3, 8, 5), 2) for name, (dealt, _, _) in ALONG.items()}
OVER |= {"of four": ("positions", ALONG["in order"][0], (3, 8, 5), 4)}


@pytest.mark.parametrize("over", OVER)
@pytest.mark.short("square")
def test_loops_that_carry_sums_and_more_are_as_on_one_device(over):
    where, dealt, sizes, n = OVER[over]
    turn = list(OVER).index(over)
    seeds = [turn * len(FAULTS), (turn + 1) * len(FAULTS) + 1 + turn]
    alone = check([functools.partial(scans, seed, sizes, where) for seed in seeds], n, dealt=dealt)
    assert len(alone) == 1  # that without a fault


@SLOW
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("first", range(0, 100, 20))
def test_and_many_more_that_carry_sums(over, first):
    where, dealt, sizes, n = OVER[over]
    seeds = range(first, first + 20)
    check([functools.partial(scans, seed, sizes, where) for seed in seeds], n, dealt=dealt)


def test_determinants_and_solutions_of_each_row_send_nothing():
    names = ["likelihoods_of_covariances", "solved_over_features"]
    programs = [functools.partial(named, name, "square", among=PROGRAMS) for name in names]
    assert len(check(programs, 2)) == len(names)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(8))
@pytest.mark.parametrize("folds", [True, False])
def test_rows_and_positions_are_split_at_once(turn, folds):
    dealt = Dealt(POSITIONS, folds, "positions")
    along = [functools.partial(named, n, "square", 0, PROGRAMS) for n in sorted(PROGRAMS)]
    others = [functools.partial(named, n, "alike") for n in sorted(TYPICAL.keys() - ON_MESHES_ONLY)]
    programs = (along + others)[turn + 8 * folds :: 16]
    check(programs, 2, dealt=dealt, devices=by_two_sides)


ON_MESHES_ONLY = {"ragged_products_of_experts"}  # JAX has no rule of it for vmap
SETS = [(sizes, n) for n in (2, 4) for sizes in SIZES]
TURNS = [pytest.param(turn, marks=[] if turn == 0 else SLOW) for turn in range(len(SETS))]


@pytest.mark.parametrize("which", range(len(SETS)), ids=[f"{s} on {n}" for s, n in SETS])
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.short("0-plain on 4")
def test_what_people_write_is_as_on_one_device(which, turn, record_property):
    """Each turn runs every program once; all turns run it with all sizes and devices."""
    sizes, n = SETS[which]
    names = sorted(TYPICAL.keys() - ON_MESHES_ONLY)[(which + turn) % len(SETS) :: len(SETS)]
    without = check([functools.partial(named, name, sizes, seed=turn) for name in names], n)
    record_property("programs without a gather", f"{len(without)} of {len(names)}")
    print(f"{len(without)} of {len(names)} programs gather nothing")


# Loops, branches and collectives of several kinds: what differs among devices hangs or differs.
ON_MESHES = [
    *sorted(ON_MESHES_ONLY),
    "balance_of_experts",
    "branch_in_a_loop",
    "branch_on_all_rows",
    "branches_without_sums_inside",
    "called_back",
    "chunks_of_words",
    "clip_contrastive",
    "clipped_in_every_layer",
    "codebook",
    "fixed_point",
    "k_means",
    "keys_of_rows_along_a_loop",
    "layers_with_batch_norm_and_dropout",
    "loop_for_each_row",
    "microbatches_with_a_sum_of_gradients",
    "queue_of_keys",
    "recurrence_over_rows",
    "search_for_a_temperature",
    "shared_layers_until_small",
    "shuffled_rows",
    "sinkhorn",
    "worst_group",
]
LOOPS = ["until", "branch", "scan", "loop", "until", "layers", "branch", "reduce", "own_rule"]


def looping(seed, sizes=None):
    """Return a program of loops and branches."""
    rng = np.random.default_rng(seed)
    names = [LOOPS[i] for i in rng.permutation(len(LOOPS))[: int(rng.integers(3, 6))]]
    return of_steps(seed, [(name, i) for i, name in enumerate(names)], sizes)


@pytest.mark.parametrize("name", ON_MESHES)
@pytest.mark.short(
    "ragged_products_of_experts",
    "clip_contrastive",
    "microbatches_with_a_sum_of_gradients",
    "worst_group",
)
def test_loops_and_branches_on_real_devices(name):
    check([lambda: named(name, "more")], 8, devices=by_shard_map)


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, pytest.param(8, marks=SLOW)])
def test_loops_and_branches_drawn_from_seeds_on_real_devices(n):
    programs = [functools.partial(looping, 1000 * n + i) for i in range(10)]
    check(programs, n, at_once=5, devices=by_shard_map)


@SLOW
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_more_loops_and_branches_on_real_devices(first):
    programs = [functools.partial(looping, first + i) for i in range(10)]
    check(programs, 8, at_once=5, devices=by_shard_map)


TENS = [pytest.param(first, marks=SLOW if first else ()) for first in range(0, 160, 10)]
ON_MESH_SIDES = ["positions", "zigzag", pytest.param("widths", marks=SLOW)]


@pytest.mark.parametrize("side", ON_MESH_SIDES)
@pytest.mark.parametrize("first", TENS)
@pytest.mark.short("0-positions")
def test_loops_and_branches_along_other_sides_on_real_devices(side, first):
    make = functools.partial(SIDES[side].program, n=4, make=looping)
    programs = [functools.partial(make, first + i) for i in range(10)]
    check(programs, 4, at_once=5, devices=by_shard_map, dealt=SIDES[side].dealt)


TWO_AXES = functools.partial(by_shard_map, axes=("node", "chip"))


@pytest.mark.parametrize("n", [4, pytest.param(8, marks=SLOW)])
def test_rows_along_two_axes_of_the_mesh(n):
    names = [
        "dropout",
        "recurrence_over_rows",
        "clip_contrastive",
        "numbers_of_rows",
        "queue_of_keys",
    ]
    check([functools.partial(named, name, "more") for name in names], n, devices=TWO_AXES)


# --- what the pieces promise --------------------------------------------------------------------


def on_devices(n, function, *arguments, told=None):
    """Return what n devices hold of the results, and the wholes that the side makes of these."""
    side = AxisGroup(("rows",), n)
    is_value = lambda v: isinstance(v, ShardedValue | PartialValue)

    def device(arguments):
        found = run_partitioned(side, function, *arguments, comms=told)
        return found, jax.tree.map(side.replicate, found, is_leaf=is_value)

    axes = jax.tree.map(lambda v: 0 if is_value(v) else None, arguments, is_leaf=is_value)
    return jax.vmap(device, in_axes=(axes,), axis_name="rows", axis_size=n)(arguments)


def rows_of(x, n, dim=0):
    return ShardedValue(jnp.stack(jnp.split(jnp.asarray(x), n, dim)), Split(dim))


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_the_whole_of_a_result_is_the_whole_on_every_device(n):
    x = np.random.default_rng(0).normal(size=(3, 8, 5)).astype(np.float32)

    def function(x):
        return {
            "rows": x + 1,
            "turned": x.T,
            "merged": x.reshape(24, 5),
            "merged otherwise": jnp.swapaxes(x, 0, 1).reshape(24, 5),
            "all": x.reshape(-1),
            "sum": x.sum(1),
            "mean": x.mean((0, 1)),
            "greatest": x.max(1),
            "shifted": jnp.roll(x, 3, 1),
            "twice": jnp.concatenate([x, x], 1),
            "split": x.reshape(3, 2, 4, 5),
            "truths": x > 0,
            "numbers": jnp.arange(8),
            "nested": (x[:, :4], [x[:, 1::2], x[0, 0, 0]]),
        }

    found, wholes = on_devices(n, function, rows_of(x, n, 1))
    is_value = lambda v: isinstance(v, ShardedValue | PartialValue)
    flat = zip(
        jax.tree.leaves(found, is_leaf=is_value),
        jax.tree.leaves(wholes),
        jax.tree.leaves(function(jnp.asarray(x))),
        strict=True,
    )
    for value, own, expected in flat:
        assert own.shape == (n, *expected.shape)
        for each in own:
            np.testing.assert_allclose(each, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(whole(value, n), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [2, 4])
def test_sums_over_devices_may_be_given(n):
    rng = np.random.default_rng(0)
    shares, x = rng.normal(size=(n, 3)).astype(np.float32), rng.normal(size=(8, 3))
    x = x.astype(np.float32)

    def function(total, x):
        linear = total * 2 + total[::-1]
        return linear, jnp.tanh(total), x * total[None], x @ total, total, total**2 + 1, -total

    found, wholes = on_devices(n, function, PartialValue(jnp.asarray(shares)), rows_of(x, n))
    expected = function(jnp.asarray(shares.sum(0)), jnp.asarray(x))
    for own, right in zip(wholes, expected, strict=True):
        for each in own:
            np.testing.assert_allclose(each, right, rtol=1e-4, atol=1e-5)
    assert len(found) == len(expected)


@pytest.mark.parametrize("n", [1, 4])
def test_a_function_may_close_over_weights_and_be_derived(n):
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=3).astype(np.float32), rng.normal(size=(8, 3)).astype(np.float32)
    side = AxisGroup(("rows",), n)
    of_all = lambda w, x: jnp.tanh(x @ w).mean() ** 2 + w.sum()

    def device(w, x):
        def share(w):
            loss = run_partitioned(side, lambda x: of_all(w, x), ShardedValue(x, Split(0)))
            return loss.x if isinstance(loss, PartialValue) else loss / n

        value, slope = jax.value_and_grad(share)(w)
        return jax.lax.psum((value, slope), "rows")

    rows = jnp.stack(jnp.split(jnp.asarray(x), n))
    found = jax.vmap(device, (None, 0), axis_name="rows")(jnp.asarray(w), rows)
    expected = jax.value_and_grad(of_all)(jnp.asarray(w), jnp.asarray(x))
    for many, one in zip(found, expected, strict=True):
        for each in many:
            np.testing.assert_allclose(each, one, rtol=1e-4, atol=1e-5)


def test_a_function_that_jax_has_traced_before_keeps_what_runs_on_own_rows():
    centre = jax.jit(per_device(lambda x: x - x.mean(0, keepdims=True)))
    function = lambda x: centre(jnp.exp(centre(x)))
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    _, first = on_devices(4, function, rows_of(x, 4))
    _, again = on_devices(4, function, rows_of(x, 4))
    expected = np.concatenate([function(each) for each in np.split(x, 4)])
    for found in (first, again):
        np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)


def test_of_whole_arrays_everything_is_whole_and_nothing_is_told():
    told: list = []
    function = lambda x: (x.sum(), x @ x.T, jnp.sort(x, 0), {"x": x[::2]})
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    found, _ = on_devices(4, function, jnp.asarray(x), told=told)
    assert told == []
    assert not any(
        isinstance(v, ShardedValue | PartialValue)
        for v in jax.tree.leaves(found, is_leaf=lambda v: True)
    )
    for own, right in zip(jax.tree.leaves(found), jax.tree.leaves(function(x)), strict=True):
        np.testing.assert_allclose(own[3], right, rtol=1e-5, atol=1e-6)


def test_what_is_sent_is_told_with_its_line():
    told: list = []
    function = lambda x: (jnp.sort(x, 0), jnp.max(x), jnp.tanh(x.sum()))
    on_devices(4, function, rows_of(np.ones((8, 3), np.float32), 4), told=told)
    assert {record.action for record in told} >= {"gather"}
    assert {record.action for record in told} <= {"sum", "greatest", "least", "gather", "deal"}
    for record in told:
        assert record.operation
        assert record.bytes > 0
    assert any("test_spmd.py" in record.line for record in told)


def test_row_by_row_work_sends_nothing():
    told: list = []

    def function(w, x):
        h = jax.nn.gelu(x @ w)
        h = (h - h.mean(-1, keepdims=True)) / (1 + h.std(-1, keepdims=True))
        return jnp.cumsum(jnp.sort(h, -1), -1), jax.nn.softmax(h), h.argmax(-1), h.sum()

    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    found, _ = on_devices(4, function, jnp.asarray(x[:3]), rows_of(x, 4), told=told)
    assert told == []
    assert [type(v) for v in found] == [ShardedValue, ShardedValue, ShardedValue, PartialValue]


def test_the_program_is_traced_at_the_sizes_of_the_whole_batch():
    seen = []

    def function(x):
        seen.append(x.shape)
        return x / len(x)

    on_devices(4, function, rows_of(np.ones((3, 8), np.float32), 4, 1))
    assert set(seen) == {(3, 8)}


def test_the_page_shows_the_table_of_rules():
    page = (Path(__file__).parents[1] / "docs/own_programs.md").read_text(encoding="utf-8")
    assert f"\n{table()}\n" in page, "paste the output of python -m tests.rules_page"
