"""Attention across the devices that share a row: any number of them, the work of each, masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import hfjax
from hfjax.models.attention import causal_attention, windowed
from hfjax.pallas_kernels.attention.mask import Mask
from hfjax.parallel.extensions.context_parallel.ring_attention import Ring
from hfjax.parallel.extensions.context_parallel.ring_block import (
    AttentionBlock,
    MaskedBlock,
    ZigzagBlock,
)
from hfjax.parallel.extensions.context_parallel.sequence_layout import (
    SequenceLayout,
    attention_work,
    max_over_mean,
)
from hfjax.parallel.extensions.context_parallel.ulysses import HeadAllToAll
from hfjax.parallel.mesh import AXES

B, H, G, D = 2, 4, 2, 8


def across(deal, length, gathers, window=None, documents=None, kernels=False):
    """Return (q, k, v, do) -> (attended, gradients), in the order of positions."""
    mesh = hfjax.make_mesh(devices=jax.devices()[: deal.devices], context=deal.devices)
    plain = deal.order == "zigzag" and window is None and documents is None
    dealt = deal.device_positions(length).ravel()
    undone = np.argsort(dealt)

    exchange = HeadAllToAll(deal, ("context",), lambda run: run)

    def local(held, *operands):
        groups = None if documents is None else exchange.gather_documents(held)
        q, k, v, do = map(exchange.to_heads, operands) if deal.ulysses > 1 else operands
        visit = ZigzagBlock(deal, AttentionBlock(kernels))
        if not plain:
            visit = MaskedBlock(deal, AttentionBlock(kernels), Mask(window=window), groups)
        hops = deal.hops(length, window)
        travel = Ring(deal, ("context",), visit, gathers, hops)
        out, kept = travel.forward(q, k, v)
        found = out, travel.backward((q, k, v), kept, do)
        return jax.tree.map(exchange.to_positions, found) if deal.ulysses > 1 else found

    rows = P(None, "context")
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=rows,
        out_specs=rows,
        axis_names=set(AXES),
        check_vma=False,
    )

    @jax.jit
    def whole(*operands):
        held = np.zeros((B, length), np.int32) if documents is None else documents
        found = run(*(x[:, dealt] for x in (held, *operands)))
        return jax.tree.map(lambda x: x[:, undone], found)

    return whole


def operands(length):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(B, length, heads, D)) for heads in (H, G, G, H)]


def on_one_device(q, k, v, do, window=None, documents=None):
    attend = causal_attention if window is None else windowed(window)
    inside = () if documents is None else (jnp.asarray(documents),)

    @jax.jit
    def both(q, k, v, do):
        out, pull = jax.vjp(lambda *x: attend(*x, *inside), q, k, v)
        return out, pull(do)

    return both(q, k, v, do)


def apart(found, wanted):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


@pytest.mark.parametrize("gathers", [False, True], ids=["ring", "allgather"])
@pytest.mark.parametrize("devices", [1, 3, 2, 5, 6, 7])
@pytest.mark.short("3-ring")
def test_any_number_of_devices_attends_as_one(devices, gathers):
    with jax.enable_x64(True):
        x = operands(4 * devices)  # two positions in each chunk
        run = across(SequenceLayout(devices, "zigzag"), 4 * devices, gathers)
        assert apart(run(*x), on_one_device(*x)) < 1e-12


def test_one_position_on_each_device():
    with jax.enable_x64(True):
        x = operands(5)
        run = across(SequenceLayout(5, "contiguous"), 5, gathers=False)
        assert apart(run(*x), on_one_device(*x)) < 1e-12


@pytest.mark.parametrize("window", [1, 2, 9, 16])
@pytest.mark.short("9")
def test_a_window_ends_the_ring_where_nothing_more_is_seen(window):
    with jax.enable_x64(True):
        deal, x = SequenceLayout(4, "contiguous"), operands(32)
        run = across(deal, 32, gathers=False, window=window)
        assert apart(run(*x), on_one_device(*x, window=window)) < 1e-12
        hops = {1: 0, 2: 1, 9: 1, 16: 2}[window]
        assert deal.hops(32, window) == hops
        sent = hfjax.collectives(jax.jit(run).lower(*x)).count("permute")
        assert sent == hops + (2 * hops if hops else 0)  # keys forward; keys, gradients backward


@pytest.mark.slow
def test_tokens_of_documents_of_their_own_attend_to_themselves():
    """Every row has documents of one token: nothing of another device is seen."""
    with jax.enable_x64(True):
        x, documents = operands(8), np.tile(np.arange(8, dtype=np.int32), (B, 1))
        run = across(SequenceLayout(2, "zigzag"), 8, gathers=True, documents=documents)
        assert apart(run(*x), on_one_device(*x, documents=documents)) < 1e-12


@pytest.mark.parametrize("gathers", [False, True], ids=["ring", "allgather"])
@pytest.mark.short("ring")
def test_where_neighbours_exchange_heads_documents_are_those_of_all_of_a_group(gathers):
    with jax.enable_x64(True):
        x, documents = operands(16), np.array(B * [[0] * 3 + [1] * 6 + [2] * 7], np.int32)
        run = across(SequenceLayout(4, "contiguous", ulysses=2), 16, gathers, documents=documents)
        assert apart(run(*x), on_one_device(*x, documents=documents)) < 1e-12


def test_in_zigzag_order_each_hop_has_two_equal_blocks_and_nothing_is_masked():
    """3 blocks at home (two of them triangles), 2 for each hop: (2N + 1) of 4 N² pieces."""
    n, length = 4, 64
    chunk = length // (2 * n)
    mesh = hfjax.make_mesh(devices=jax.devices()[:n], context=n)
    travel = Ring(
        SequenceLayout(n),
        ("context",),
        ZigzagBlock(SequenceLayout(n), AttentionBlock(False)),
        False,
        n - 1,
    )
    rows = P(None, "context")
    forward = jax.shard_map(
        lambda q, k, v: travel.forward(q, k, v)[0], mesh=mesh, in_specs=rows, out_specs=rows,
        axis_names=set(AXES), check_vma=False,
    )  # fmt: skip
    shapes = [jax.ShapeDtypeStruct((B, length, heads, D), "float32") for heads in (H, G, G)]
    found = products(jax.make_jaxpr(forward)(*shapes).jaxpr)
    assert found == (2 * n + 1) * 2 * (2 * B * H * chunk * chunk * D)


def products(jaxpr):
    """The flops of the products of a program, loops multiplied out; of branches the longest."""
    total = 0
    for e in jaxpr.eqns:
        if e.primitive.name == "dot_general":
            (contracted, _), _ = e.params["dimension_numbers"]
            depth = int(np.prod([e.invars[0].aval.shape[d] for d in contracted]))
            total += 2 * depth * int(np.prod(e.outvars[0].aval.shape))
        inner = [
            products(getattr(x, "jaxpr", x))
            for value in e.params.values()
            for x in (value if isinstance(value, tuple | list) else [value])
            if hasattr(getattr(x, "jaxpr", x), "eqns")
        ]
        times = e.params.get("length", 1) if e.primitive.name == "scan" else 1
        total += times * (max(inner, default=0) if e.primitive.name == "cond" else sum(inner))
    return total


def test_in_zigzag_order_all_devices_have_the_same_work():
    one_document = np.zeros((1, 64), int)
    assert max_over_mean(attention_work(SequenceLayout(8, "zigzag"), one_document)) == 1.0
    assert (
        max_over_mean(attention_work(SequenceLayout(8, "contiguous"), one_document)) == 16 / 9
    )  # whole blocks
    assert len(set(attention_work(SequenceLayout(8, "zigzag", ulysses=2), one_document))) == 1


def test_positions_are_dealt_once_each_in_every_order():
    for deal in (
        SequenceLayout(3, "zigzag"),
        SequenceLayout(4, "contiguous", 2),
        SequenceLayout(8, "zigzag", 4),
        SequenceLayout(8, "zigzag", 8),
    ):
        length = 2 * deal.length_multiple
        assert sorted(deal.device_positions(length).ravel()) == list(range(length))
        dealt = deal.device_positions(length).ravel()
        whole = dealt[np.argsort(dealt)]
        np.testing.assert_array_equal(whole, np.arange(length))
