"""One block of attention: the reference against a dense oracle, the kernels against both.

[B]atch, [S] queries, [T] keys, [H] heads of queries, [G] heads of keys, head [D]im.
"""

from functools import partial, reduce
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from hfjax.pallas_kernels.attention import block as flash, reference
from hfjax.pallas_kernels.attention.block import Mask, Positions, Tuning
from hfjax.pallas_kernels.attention.common import TileVisits, Tiling
from hfjax.pallas_kernels.attention.mask import Tiles, key_visits, query_visits, visible
from tests import kernels
from tests.h200 import h200s
from tests.kernels import assert_fits, figures, gaussian, lowered, relative

interpreted = kernels.interpreted
FULL, CAUSAL = Mask(causal=False), Mask()


def documents(length, size, first=0):
    return jnp.asarray(((np.arange(length, dtype=np.int32) + first) // size)[None])


def within(length, keys, size, query_start=0, key_start=0):
    """Places in documents of one size."""
    of_queries, of_keys = documents(length, size, query_start), documents(keys, size, key_start)
    return Positions(query_start, key_start, of_queries, of_keys)


CASES = {  # S, T, H, G, D, mask, places
    "everything": (100, 130, 2, 2, 8, FULL, Positions()),
    "causal": (130, 130, 2, 2, 8, CAUSAL, Positions()),
    "window": (130, 130, 2, 1, 8, Mask(True, 20), Positions()),
    "window both ways": (130, 130, 2, 1, 8, Mask(False, 20), Positions()),
    "four heads share keys": (70, 70, 4, 1, 8, CAUSAL, Positions()),
    "two heads share keys": (70, 70, 4, 2, 8, CAUSAL, Positions()),
    "documents": (130, 130, 2, 1, 8, CAUSAL, within(130, 130, 33)),
    "documents, everything": (64, 128, 2, 1, 8, FULL, within(64, 128, 50)),
    "an earlier block": (70, 130, 2, 1, 8, CAUSAL, Positions(150, 10)),
    "a later block, seen in part": (130, 70, 2, 1, 8, CAUSAL, Positions(10, 90)),
    "a later block, not seen": (70, 70, 2, 1, 8, CAUSAL, Positions(0, 70)),
    "beyond the window": (70, 70, 2, 1, 8, Mask(True, 30), Positions(150, 0)),
    "documents elsewhere": (70, 130, 2, 1, 8, Mask(True, 90), within(70, 130, 40, 120, 30)),
    "one query, one key": (1, 1, 1, 1, 8, CAUSAL, Positions()),
}


def operands(case, dtype=jnp.float32):
    """Return q, k, v and gradients of the attention and of lse."""
    length, keys, heads, groups, width = case[:5]
    shapes = [(1, length, heads, width)] + [(1, keys, groups, width)] * 2
    q, k, v, do = (gaussian(i, s, dtype) for i, s in enumerate([*shapes, shapes[0]]))
    return (q, k, v), (do, gaussian(9, (1, heads, length)))


def dense(q, k, v, mask, places):
    """The oracle: all scores at once, in the precision of the operands."""
    near, same = visible(mask, places, jnp.arange(q.shape[1]), jnp.arange(k.shape[1]))
    seen = (near[None] if same is None else near[None] & same)[:, None]
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
    s = jnp.where(seen, s, -jnp.inf)
    some = seen.any(-1)
    lse = jnp.where(some, jax.nn.logsumexp(jnp.where(some[..., None], s, 0.0), -1), -jnp.inf)
    p = jnp.where(seen, jnp.exp(s - jnp.where(some, lse, 0.0)[..., None]), 0.0)
    return jnp.einsum("bhst,bthd->bshd", p, v), lse


def exact(case, inputs, cotangents):
    """Return the oracle's (out, lse, dq, dk, dv) in float64."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (*inputs, *cotangents)]
        return _with_gradients(lambda *x: dense(*x, *case[5:]), wide[:3], wide[3:])


def _with_gradients(function, inputs, cotangents):
    """Return (out, lse, dq, dk, dv); what sees nothing has no lse to pull at."""

    def all_of_it(inputs, cotangents):
        (out, lse), pull = jax.vjp(function, *inputs)
        do, dlse = cotangents
        return out, lse, *pull((do.astype(out.dtype), jnp.where(lse > -jnp.inf, dlse, 0.0)))

    return jax.jit(all_of_it)(inputs, cotangents)


def assert_near(found, expected, bound):
    for name, one, other in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=False):
        if name == "lse":
            np.testing.assert_array_equal(np.isneginf(one), np.isneginf(other))
            one, other = (np.where(np.isneginf(x), 0.0, x) for x in (one, other))
        error = relative(one, other)
        zero = not np.any(np.asarray(other, np.float64))
        assert error <= bound or (zero and not np.any(np.asarray(one, np.float32))), (name, error)


@pytest.fixture
def small_blocks(monkeypatch):
    """The reference's blocks are small, so that small operands have several."""
    monkeypatch.setattr(reference, "BLOCK", 32)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.short("everything", "one query, one key")
def test_the_reference_and_its_gradients_are_those_of_dense_attention(small_blocks, name):
    case = CASES[name]
    inputs, cotangents = operands(case)
    with jax.default_matmul_precision("highest"):
        attend = lambda q, k, v: flash.reference_attend(q, k, v, *case[5:])
        found = _with_gradients(attend, inputs, cotangents)
    assert_near(found, exact(case, inputs, cotangents), 1e-5)


@pytest.mark.parametrize("name", ["documents elsewhere"])
def test_the_references_state_has_gradients_of_its_own(small_blocks, name):
    case = CASES[name]
    inputs, cotangents = operands(case)
    with jax.default_matmul_precision("highest"):
        finished = lambda q, k, v: flash.finish(flash.reference(q, k, v, None, case[5], case[6]))
        found = _with_gradients(finished, inputs, cotangents)
    assert_near(found, exact(case, inputs, cotangents), 1e-5)


def test_the_reference_in_bfloat16_is_within_a_hundredth(small_blocks):
    case = CASES["documents"]
    inputs, cotangents = operands(case, jnp.bfloat16)
    attend = lambda q, k, v: flash.reference_attend(q, k, v, *case[5:])
    found = _with_gradients(attend, inputs, cotangents)
    assert [x.dtype for x in found] == [jnp.bfloat16, jnp.float32] + [jnp.bfloat16] * 3
    assert_near(found, exact(case, inputs, cotangents), 1e-2)


def blocks_of_keys(case, count):
    """Return slices of the keys and where each begins."""
    size = -(-case[1] // count)
    return [slice(i * size, min((i + 1) * size, case[1])) for i in range(count)]


def places_of(places, keys):
    documents = places.key_documents
    documents = None if documents is None else jnp.asarray(np.asarray(documents)[:, keys])
    return places._replace(key_start=places.key_start + keys.start, key_documents=documents)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.short("3")
def test_blocks_of_keys_in_any_order_are_one_block(small_blocks, count):
    case = CASES["documents elsewhere"]
    (q, k, v), _ = jax.device_get(operands(case))
    mask, places = case[5:]
    expected = jax.jit(dense, static_argnums=3)(q, k, v, mask, places)
    keys = blocks_of_keys(case, count)
    block = jax.jit(flash.reference, static_argnums=4)
    one = lambda b, state=None: block(q, k[:, b], v[:, b], state, mask, places_of(places, b))
    finish = jax.jit(flash.finish)
    for order in list(permutations(range(count)))[::5]:
        visited = reduce(lambda state, i: one(keys[i], state), order, None)
        assert_near(finish(visited), expected, 1e-5)


def assert_near_pair(found, expected, bound):
    for one, other in zip(found, expected, strict=True):
        assert relative(one, other) < bound


def test_gradients_of_blocks_add_up_to_those_of_the_whole(small_blocks):
    case = CASES["documents elsewhere"]
    (q, k, v), (do, dlse) = operands(case)
    mask, places = case[5:]
    expected = exact(case, (q, k, v), (do, dlse))
    dlse = jnp.where(expected[1] > -jnp.inf, dlse, 0.0)
    final = flash.final(expected[0].astype(q.dtype), expected[1].astype(q.dtype), do, dlse)
    pull = jax.jit(flash.reference_backward, static_argnums=4)
    pulled = [
        pull(q, k[:, b], v[:, b], final, mask, places_of(places, b))
        for b in blocks_of_keys(case, 2)
    ]
    dq = sum(p[0] for p in pulled)
    dk, dv = (jnp.concatenate([p[i] for p in pulled], axis=1) for i in (1, 2))
    assert_near_pair((dq, dk, dv), expected[2:], 1e-5)


def test_gradients_flow_through_the_state(small_blocks):
    case = CASES["a later block, seen in part"]
    inputs, cotangents = operands(case)
    mask, places = case[5:]

    def visited(q, k, v):
        state: Any = None
        for b in blocks_of_keys(case, 2):
            state = flash.reference(q, k[:, b], v[:, b], state, mask, places_of(places, b))
        return flash.finish(state)

    found = _with_gradients(visited, inputs, cotangents)
    assert_near(found, exact(case, inputs, cotangents), 1e-5)


def test_the_reference_keeps_no_scores():
    shape, length = (1, 2048, 2, 16), 2048
    loss = lambda q: flash.reference_attention(q, q, q).sum()
    compiled = jax.jit(jax.grad(loss)).lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < length * length * 4  # of two heads' scores: half


def test_the_reference_agrees_with_jaxs_own():
    q, k, v = (gaussian(i, (2, 600, h, 16)) for i, h in enumerate((4, 2, 2)))
    theirs = jax.jit(partial(jax.nn.dot_product_attention, is_causal=True))(q, k, v)
    assert relative(jax.jit(flash.reference_attention)(q, k, v), theirs) < 1e-5


@pytest.mark.parametrize("name", CASES)
@pytest.mark.short("everything", "documents", "one query, one key")
def test_tiles_that_are_not_visited_hold_nothing_and_whole_ones_hold_all(name):
    length, keys, *_, mask, places = CASES[name]
    tilings = (Tiles(length, keys, 32, 16), Tiles(length, keys, 16, 48))

    @jax.jit
    def all_of(places):
        near, same = visible(mask, places, jnp.arange(length), jnp.arange(keys))
        tables = [(query_visits(mask, places, t), key_visits(mask, places, t)) for t in tilings]
        return near[None] if same is None else near[None] & same, tables

    (seen, *_), tables = jax.device_get(all_of(places))
    for tiles, ((by_query, *_), (by_key, *_)) in zip(tilings, tables, strict=True):
        _check_visits(seen, by_query, tiles.query_tile, tiles.key_tile)
        _check_visits(seen.T, by_key, tiles.key_tile, tiles.query_tile, ragged=keys)


def _check_visits(seen, table, rows, columns, ragged=None):
    for i, row in enumerate(table):
        visit, part = TileVisits(*row.tolist()), seen[i * rows : (i + 1) * rows]
        order = [int(visit.tile(step)) for step in range(visit.steps)]
        assert sorted(order) == list(range(visit.start, visit.end))
        for tile in range(-(-seen.shape[1] // columns)):
            inside = part[:, tile * columns : (tile + 1) * columns]
            if tile not in order:
                assert not inside.any()
            if tile in order[: visit.num_full]:
                assert inside.all()
                assert ragged is not None or inside.shape[1] == columns


def shapes(dtype=jnp.bfloat16, length=128, width=64, heads=2, groups=1, keys=None):
    q = jax.ShapeDtypeStruct((1, length, heads, width), dtype)
    k = jax.ShapeDtypeStruct((1, keys or length, groups, width), dtype)
    return q, k, k


@pytest.mark.parametrize(
    ("given", "places", "message"),
    [
        (shapes(width=96), Positions(), r"q_BSHD bfloat16\[1, 128, 2, 96\].*64 and 128 only"),
        (shapes(jnp.float32), Positions(), "the kernels take bfloat16 or float16. Cast, or use"),
        (shapes(heads=3, groups=2), Positions(), "a multiple of heads of keys"),
        ((*shapes()[:2], shapes(jnp.float16)[2]), Positions(), "all have one dtype"),
        ((*shapes()[:2], shapes(keys=64)[2]), Positions(), "keys and values have one shape"),
        (
            (*shapes()[:2], jax.ShapeDtypeStruct((1, 2), jnp.bfloat16)),
            Positions(),
            "four dimensions",
        ),
        (shapes(), Positions(0, 0, documents(128, 9)), "for queries and keys, or for none"),
        (shapes(), Positions(0, 0, *[documents(64, 9)] * 2), r"\[1, 64\].*one number per token"),
        (shapes(), Positions(0, 0, *[documents(128, 9) * 1.0] * 2), "int32 only"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused(given, places, message):
    assert flash.refuses(*shapes()) is None
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda q, k, v: flash.attend(q, k, v, CAUSAL, places), *given)


def test_a_state_of_other_queries_is_refused():
    state = jax.eval_shape(flash.reference, *shapes(length=64))
    with pytest.raises(ValueError, match=r"state\.o .* a state goes on with the queries"):
        jax.eval_shape(flash.flash_block, *shapes(), state)


def test_what_no_kernel_is_cut_like_is_refused():
    with pytest.raises(ValueError, match="1 to 3 consumers"):
        jax.eval_shape(partial(flash.attention, tuning=Tuning(Tiling(4))), *shapes())
    with pytest.raises(ValueError, match="window=0: at least 1"):
        Mask(window=0)


# ------------------------------------------------------------------------------- the kernels

SMALL = {  # what the interpreter runs
    "causal, two heads share keys": (128, 192, 2, 1, 64, CAUSAL, Positions(64, 0)),
    "ragged, window, documents": (100, 150, 1, 1, 64, Mask(True, 40), within(100, 150, 50, 50, 0)),
    "not seen": (64, 128, 1, 1, 64, CAUSAL, Positions(0, 64)),
}
WIDE = {
    "everything, 128": (128, 300, 1, 1, 128, FULL, Positions()),
    "causal, 128": (200, 200, 2, 2, 128, CAUSAL, Positions()),
    "documents, four heads": (256, 256, 4, 1, 64, FULL, within(256, 256, 70)),
    "window": (256, 512, 1, 1, 64, Mask(True, 100), Positions(256, 0)),
    "part": (130, 130, 2, 1, 64, CAUSAL, Positions(10, 70)),
}


def _kernels_agree(case, dtype, capfd, tuning=flash.TUNING):
    inputs, cotangents = operands(case, dtype)
    attend = lambda q, k, v: flash.attend(q, k, v, case[5], case[6], tuning)
    found = _with_gradients(attend, inputs, cotangents)
    assert_near(found, exact(case, inputs, cotangents), 1e-2)
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize("name", SMALL)
def test_the_kernels_and_their_gradients_are_those_of_dense_attention(interpreted, capfd, name):
    _kernels_agree(SMALL[name], jnp.bfloat16, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
def test_the_kernels_agree_on_larger_operands(interpreted, capfd, name):
    _kernels_agree(WIDE[name], jnp.float16, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("consumers", [1, 3])
def test_the_kernels_agree_however_they_are_cut(interpreted, capfd, consumers):
    cut = Tiling(consumers, 64, 2)
    _kernels_agree(WIDE["part"], jnp.bfloat16, capfd, Tuning(cut, cut, Tiling(consumers, 128, 2)))


def test_kernels_visit_blocks_in_any_order_and_their_gradients_add_up(interpreted, capfd):
    case = (64, 160, 1, 1, 64, Mask(True, 120), Positions(90, 0))
    (q, k, v), (do, _) = operands(case, jnp.bfloat16)
    expected = exact(case, (q, k, v), (do, jnp.zeros((1, 1, 64))))
    late, early = blocks_of_keys(case, 2)[::-1]
    places = [places_of(case[6], b) for b in (late, early)]
    state = flash.flash_block(q, k[:, late], v[:, late], None, case[5], places[0])
    state = flash.flash_block(q, k[:, early], v[:, early], state, case[5], places[1])
    assert state.o.dtype == jnp.float32
    out, lse = flash.finish(state)
    final = flash.final(out, lse, do)
    assert_near((out, lse), expected[:2], 1e-2)
    pulled = [
        flash.flash_block_backward(q, k[:, b], v[:, b], final, case[5], p)
        for b, p in zip((late, early), places, strict=True)
    ]
    dk, dv = (jnp.concatenate([p[i] for p in pulled[::-1]], axis=1) for i in (1, 2))
    assert_near_pair((pulled[0][0] + pulled[1][0], dk, dv), expected[2:], 1e-2)
    assert "RACE" not in capfd.readouterr().out


def _gradient(q, k, v, mask=CAUSAL, places=None, tuning=flash.TUNING):
    attend = lambda q, k, v: flash.attend(q, k, v, mask, places or Positions(), tuning)[0]
    return jax.vjp(attend, q, k, v)[1](q)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.short("128-bfloat16")
def test_the_kernels_lower_for_cuda(dtype, width):
    given = shapes(dtype, 500, width, 4, 2, 700)
    text = lowered(_gradient, *given)
    assert text.count("mosaic_gpu") >= 3


def unknown(*places):
    """Places of which only shapes are known."""
    return Positions(*places)


def test_a_block_with_a_state_lowers_for_cuda_at_places_known_when_it_runs():
    q, k, v = shapes(length=256, keys=512)
    state = jax.eval_shape(flash.reference, q, k, v)
    start = jax.ShapeDtypeStruct((), jnp.int32)
    of = lambda length: jax.ShapeDtypeStruct((1, length), jnp.int32)
    block = lambda q, k, v, state, places: flash.flash_block(q, k, v, state, Mask(True, 99), places)
    lowered(block, q, k, v, state, unknown(start, start, of(256), of(512)))
    final = jax.eval_shape(flash.final, q, state.l, q)
    back = lambda q, k, v, final, p: flash.flash_block_backward(q, k, v, final, Mask(True, 9), p)
    lowered(back, q, k, v, final, unknown(start, start, of(256), of(512)))


def _on_an_h200(tree):
    sharding = SingleDeviceSharding(h200s(1)[0])
    put = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(put, tree)


@pytest.mark.cuda
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=["causal", "everything"])
def test_the_kernels_fit_an_h200(capfd, width, mask):
    given = _on_an_h200(shapes(length=1024, width=width, heads=4, groups=2))
    found = figures(capfd, partial(_gradient, mask=mask), *given)
    assert len(found) == 3
    assert_fits(found)


@pytest.mark.cuda
@pytest.mark.parametrize("width", [64, 128])
def test_kernels_with_every_mask_fit_an_h200(capfd, width):
    documents = jax.ShapeDtypeStruct((1, 1000), jnp.int32)
    given = _on_an_h200((*shapes(length=1000, width=width, heads=4, groups=2), documents))
    gradient = lambda q, k, v, d: _gradient(q, k, v, Mask(True, 300), Positions(0, 0, d, d))
    assert_fits(figures(capfd, gradient, *given))


@pytest.mark.cuda
@pytest.mark.parametrize("width", [64, 128])
def test_a_block_with_a_state_fits_an_h200(capfd, width):
    q, k, v = shapes(length=1024, width=width, heads=4, groups=2)
    state = jax.eval_shape(flash.reference, q, k, v)
    start = jax.ShapeDtypeStruct((), jnp.int32)
    block = lambda q, k, v, state, places: flash.flash_block(q, k, v, state, CAUSAL, places)
    given = _on_an_h200((q, k, v, state, unknown(start, start)))
    assert_fits(figures(capfd, block, *given))
    final = jax.eval_shape(flash.final, q, state.l, q)
    back = lambda q, k, v, f, places: flash.flash_block_backward(q, k, v, f, CAUSAL, places)
    assert_fits(figures(capfd, back, *_on_an_h200((q, k, v, final, unknown(start, start)))))


# ---------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1024, 4096])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_on_a_gpu_the_kernels_agree_with_jaxs_attention(gpu, length, width, causal):
    inputs = [gaussian(i, (2, length, h, width), jnp.bfloat16) for i, h in enumerate((8, 4, 4))]
    do = gaussian(3, inputs[0].shape, jnp.bfloat16)
    theirs = partial(jax.nn.dot_product_attention, is_causal=causal, implementation="xla")
    ours = lambda q, k, v: flash.attention(q, k, v, Mask(causal))
    with_gradients = lambda f: lambda *x: (f(*x), *jax.vjp(f, *x)[1](do.astype(x[0].dtype)))
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(with_gradients(theirs))(*(x.astype(jnp.float32) for x in inputs))
    assert_near_pair(jax.jit(with_gradients(ours))(*inputs), expected, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SMALL, *WIDE])
def test_on_a_gpu_the_kernels_agree_with_dense_attention(gpu, capfd, name):
    _kernels_agree({**SMALL, **WIDE}[name], jnp.bfloat16, capfd)


@pytest.mark.gpu
def test_on_a_gpu_gradients_are_the_same_bits_every_time(gpu):
    q, k, v = (gaussian(i, (2, 1000, h, 64), jnp.bfloat16) for i, h in enumerate((8, 2, 2)))
    pull = jax.jit(_gradient)
    first, second = pull(q, k, v), pull(q, k, v)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.gpu
def test_on_a_gpu_blocks_merge_into_the_whole(gpu):
    case = (512, 1500, 4, 2, 128, Mask(True, 900), within(512, 1500, 700, 1000, 0))
    (q, k, v), _ = operands(case, jnp.bfloat16)
    keys = blocks_of_keys(case, 3)
    one = lambda b, state: flash.flash_block(
        q, k[:, b], v[:, b], state, case[5], places_of(case[6], b)
    )
    state = one(keys[1], one(keys[0], one(keys[2], None)))
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    expected = dense(q, k, v, case[5], case[6])
    assert_near(flash.finish(state), expected, 1e-2)
