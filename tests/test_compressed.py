"""Collectives of 8 bits an element with error feedback: the law, what converges, what is sent."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from hfjax.pallas_kernels.compressed import (
    collectives as room,
    kernel as compressed_kernel,
    quantize,
    reference as plain,
)
from hfjax.pallas_kernels.compressed.reference import Errors
from hfjax.pallas_kernels.ring.peers import VirtualRing
from tests.kernels import assert_fits, figures, gaussian, interpreted_ring, lowered  # noqa: F401
from tests.rings import EVERY_DAY, LONG, RINGS, bytes_sent, mapped, mesh_of, on_devices, on_h200s

HOW = ("int8", "fp8")
SMALL = room.Tuning(elements=4096, stages=2, blocks=2)
F32 = jnp.float32


def pair(shape, seed=0, dtype=F32):
    return gaussian(seed, shape, dtype), gaussian(seed + 1, shape) * 0.01


def close(found, expected, bound=2e-6):
    """Equal up to float32's rounding: of the sum, and where two products are fused or are not."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, atol=bound)


# -- the plain forms ------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("sizes", "axis"), RINGS + LONG[:1], ids=str)
@pytest.mark.short("(1,)-first-int8", "(8,)-first-fp8")
def test_rows_are_summed_and_gathered_within_what_8_bits_keep(sizes, axis, how):
    mesh = mesh_of(*sizes)
    x, error = pair((mesh.size * mesh.shape[axis] * 3, 100))  # 300 elements: a short last block
    form = lambda f: on_devices(lambda x, e: f(x, e, axis, how), mesh, x, error, check=True)
    run = lambda f: jax.device_get(form(f))
    exact = lambda f: np.asarray(on_devices(lambda x: f(x, axis, tiled=True), mesh, x + error))
    shard, _ = run(plain.compressed_reduce_scatter)
    assert np.abs(shard - exact(lax.psum_scatter)).max() < 0.15 * mesh.shape[axis]
    whole, _ = run(plain.compressed_all_gather)
    assert np.abs(whole - exact(lax.all_gather)).max() < 0.15
    if mesh.shape[axis] == 1:
        np.testing.assert_array_equal(shard, x + error)
        np.testing.assert_array_equal(whole, x + error)


def reduced_over(mesh, how, reduce=plain.compressed_all_reduce):
    """Return a step: (x, errors, both of all devices) -> (the sum on each, new errors)."""
    specs = P("first"), Errors(P("first"), P("first"))
    return jax.jit(
        jax.shard_map(
            lambda x, errors: reduce(x, errors, "first", how), mesh=mesh, in_specs=specs,
            out_specs=specs, check_vma=False,
        )
    )  # fmt: skip


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.short("1-int8", "4-fp8")
def test_what_was_applied_and_what_is_owed_are_the_true_gradients(size, how):
    step = reduced_over(mesh_of(size), how)
    shape = (size * 12, 50)
    errors = Errors(jnp.zeros(shape), jnp.zeros(shape[0] * 50 // size))
    applied = true = np.zeros((12, 50))
    for t in range(20):
        gradients = gaussian(t, shape) * 2.0 ** (t % 5)
        total, errors = step(gradients, errors)
        total = np.asarray(total, np.float64).reshape(size, 12, 50)
        np.testing.assert_array_equal(total, np.broadcast_to(total[:1], total.shape))
        applied = applied + total[0]
        true = true + np.asarray(gradients, np.float64).reshape(size, 12, 50).sum(axis=0)
    owed = np.asarray(errors.sent, np.float64).reshape(size, 12, 50).sum(axis=0)
    owed = owed + np.asarray(errors.owned, np.float64).reshape(12, 50)
    assert size == 1 or np.abs(owed).max() > 1e-3
    np.testing.assert_allclose(applied + owed, true, atol=2e-4)  # of sums up to 100


def descended(how, feedback, size=4, steps=400):
    """Return how far from the optimum SGD ends on a quadratic whose gradients are compressed.

    Each device has its own target; one coordinate of a block is steep, so that a step of the
    block's scale is coarse for the others. At the optimum gradients do not vanish: they cancel.
    """
    mesh = mesh_of(size)
    steep = jnp.zeros((size, 256)).at[:, 0].set(jnp.array([400.0, -400.0, 800.0, -800.0]))
    targets = gaussian(0, (size, 256)) * 4 + steep
    reduce = reduced_over(mesh, how)

    def step(_, held):
        at, errors = held
        total, new = reduce(at[None] - targets, errors)
        return at - 0.02 * total[0], new if feedback else errors

    none = Errors(jnp.zeros((size, 256)), jnp.zeros(256))
    run = jax.jit(lambda: lax.fori_loop(0, steps, step, (jnp.zeros(256), none)))
    return float(jnp.abs(run()[0] - targets.mean(axis=0)).max())


@pytest.mark.parametrize("how", HOW)
def test_sgd_converges_with_error_feedback_and_stalls_without(how):
    fed, stalled = descended(how, feedback=True), descended(how, feedback=False)
    assert fed < 0.2 * stalled, (fed, stalled)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_gradient_of_any_device_breaks_the_sum(how, bad):
    step = reduced_over(mesh_of(4), how)
    for row in range(16):  # of each device for itself and for the others
        x = gaussian(2, (16, 64)).at[row, 5].set(bad)
        errors = Errors(jnp.zeros((16, 64)), jnp.zeros(256))
        total, _ = step(x, errors)
        finite = np.isfinite(total).reshape(4, 4, 64)
        assert not finite.all(axis=(1, 2)).any(), "a device saw nothing of it"


def test_a_checked_sum_is_known_to_be_equal_on_all():
    mesh, (x, _) = mesh_of(4), pair((16, 64))
    rows = P("first")
    run = jax.shard_map(
        lambda x, errors: plain.compressed_all_reduce(x, errors, "first"), mesh=mesh,
        in_specs=(rows, Errors(rows, rows)), out_specs=(P(None), Errors(rows, rows)),
    )  # fmt: skip
    total, _ = jax.jit(run)(x, Errors(jnp.zeros((16, 64)), jnp.zeros(256)))
    np.testing.assert_allclose(total, x.reshape(4, 4, 64).sum(axis=0), atol=0.2)


def test_the_first_errors_are_zeros_of_the_right_shapes():
    errors = plain.no_errors(jnp.ones((6, 4)), 3)
    assert errors.sent.shape == (6, 4)
    assert errors.owned.shape == (8,)
    assert not errors.sent.any()
    assert not errors.owned.any()


@pytest.mark.parametrize("how", HOW)
def test_the_plain_forms_send_a_byte_an_element_and_four_a_block(how):
    mesh, size, n = mesh_of(2, 4), 4, 4 * 1024
    given = [jax.ShapeDtypeStruct((8 * 4, 1024), F32)] * 2

    def lowered_text(f):
        run = mapped(lambda x, e: f(x, e, "second", how), mesh)
        return jax.jit(run).lower(*given).as_text()

    sent = n + 4 * n // 256
    assert (
        bytes_sent(lowered_text(plain.compressed_reduce_scatter), size) == (size - 1) * sent // size
    )
    assert bytes_sent(lowered_text(plain.compressed_all_gather), size) == (size - 1) * sent

    def both(x, error):
        errors = Errors(error, jnp.zeros(n // size))
        return plain.compressed_all_reduce(x, errors, "second", how)[0]

    text = jax.jit(mapped(both, mesh)).lower(*given).as_text()
    assert bytes_sent(text, size) == 2 * (size - 1) * sent // size


# -- the kernels, interpreted ---------------------------------------------------------------


def equal_on(sizes, axis, how="int8", block=128, rows=5, dtype=F32, tuning=SMALL):
    mesh = mesh_of(*sizes)
    x, error = pair((mesh.size * mesh.shape[axis] * rows, block), dtype=dtype)
    for name in ("compressed_reduce_scatter", "compressed_all_gather"):
        kernel = partial(getattr(room, name), axis=axis, how=how, block=block, tuning=tuning)
        form = partial(getattr(plain, name), axis=axis, how=how, block=block)
        close(*(on_devices(f, mesh, x, error) for f in (kernel, form)))


@pytest.mark.parametrize(("sizes", "axis"), EVERY_DAY, ids=str)
def test_the_kernels_equal_the_plain_forms(interpreted_ring, sizes, axis):  # noqa: F811
    equal_on(sizes, axis)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "axis"), LONG + RINGS, ids=str)
def test_the_kernels_are_equal_on_longer_rings(
    interpreted_ring,  # noqa: F811
    sizes,
    axis,
):
    equal_on(sizes, axis, "fp8")


def test_fp8_blocks_of_256_and_bfloat16_are_taken(interpreted_ring):  # noqa: F811
    equal_on((2,), "first", "fp8", block=256, dtype=jnp.bfloat16)


def test_more_rows_than_a_group_in_tiles_of_part_of_it(interpreted_ring):  # noqa: F811
    small = room.Tuning(elements=2048, stages=2, blocks=2)
    equal_on((2,), "first", rows=67, tuning=small)


@pytest.mark.parametrize("how", HOW)
def test_the_sum_over_all_is_the_two_kernels(interpreted_ring, how):  # noqa: F811
    kernel = partial(room.compressed_all_reduce, block=128, tuning=SMALL)
    form = partial(plain.compressed_all_reduce, block=128)
    x, error = pair((8, 128))
    errors = Errors(error, jnp.zeros(512))
    mesh = mesh_of(2)
    close(*(reduced_over(mesh, how, f)(x, errors) for f in (kernel, form)))


def test_xla_sends_what_the_kernel_has_quantised(interpreted_ring):  # noqa: F811
    mesh, (x, error) = mesh_of(2), pair((4, 256))
    small = quantize.Tuning(tile=8, stages=2, blocks=2)
    kernel = partial(quantize.compress, tuning=small)
    found, expected = (
        on_devices(
            lambda x, e, c=c: plain.compressed_reduce_scatter(x, e, "first", compress=c),
            mesh, x, error,
        )
        for c in (kernel, quantize.reference_compress)
    )  # fmt: skip
    close(found, expected)


@pytest.mark.parametrize("how", HOW)
def test_virtual_ranks_on_one_device_give_the_same(interpreted_ring, how):  # noqa: F811
    ring, mesh = VirtualRing(2), mesh_of(2)
    x, error = pair((2, 2, 5, 128))
    total, lost = compressed_kernel.scatter(ring, x, error, how, SMALL)
    form = partial(plain.compressed_reduce_scatter, axis="first", how=how, block=128)
    expected = on_devices(form, mesh, *(one.reshape(20, 128) for one in (x, error)))
    close((total.reshape(10, 128), lost.reshape(20, 128)), expected)
    whole, lost = compressed_kernel.gather(ring, x[:, 0], error[:, 0], how, SMALL)
    form = partial(plain.compressed_all_gather, axis="first", how=how, block=128)
    expected = on_devices(form, mesh, *(one[:, 0].reshape(10, 128) for one in (x, error)))
    close((whole.reshape(20, 128), lost.reshape(10, 128)), expected)


# -- refusals, lowering, compiling ----------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "shape", "dtype", "axis", "size", "how", "said"),
    [
        ("compressed_all_gather", (8, 256), F32, ("a", "b"), 2, "int8", "one axis is needed"),
        ("compressed_all_gather", (8, 256), F32, "a", 9, "int8", "at most 8 GPUs"),
        ("compressed_reduce_scatter", (9, 256), F32, "a", 2, "int8", "rows must be a multiple"),
        ("compressed_reduce_scatter", (8, 96), F32, "a", 2, "int8", "so x one of 512. Pad x"),
        ("compressed_all_reduce", (2, 128), F32, "a", 2, "fp8", "a multiple of block=256"),
        ("compressed_all_reduce", (8, 256), jnp.int32, "a", 2, "fp8", "float32, bfloat16 or"),
        ("compressed_all_reduce", (8, 256), F32, "a", 2, "int4", "one of 'int8', 'fp8'"),
    ],
    ids=str,
)  # fmt: skip
def test_refusals_say_what_is_allowed(what, shape, dtype, axis, size, how, said):
    reason = room.refuses(what, jax.ShapeDtypeStruct(shape, dtype), axis, size, how)
    assert reason
    assert said in reason
    assert room.refuses(what, jax.ShapeDtypeStruct((8, 256), F32), "a", 2) is None


def test_what_is_refused_raises():
    x, mesh = jnp.zeros((8, 96)), mesh_of(2)
    with pytest.raises(ValueError, match=r"so x one of 512\. Pad x, or use the reference"):
        on_devices(lambda x: room.compressed_reduce_scatter(x, x, "first"), mesh, x)
    x = jnp.zeros((8, 256), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"error \(4, 256\) bfloat16: float32 \(4, 256\)"):
        on_devices(lambda x: room.compressed_all_gather(x, x, "first"), mesh, x)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.short("int8")
def test_the_kernels_lower_for_cuda(how):
    for sizes, axis, check in (((8,), "first", True), ((2, 4), "first", False)):
        mesh, (x, error) = mesh_of(*sizes), pair((512, 256))
        for f in (room.compressed_reduce_scatter, room.compressed_all_gather):
            lowered(mapped(partial(f, axis=axis, how=how), mesh, check), x, error)
    for size in (1, 4):
        scatter = partial(compressed_kernel.scatter, VirtualRing(size), how=how)
        lowered(partial(scatter, tuning=room.Tuning(blocks=32)), *pair((size, size, 8, 256)))


@pytest.mark.cuda
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("block", quantize.BLOCKS)
def test_the_kernels_fit_h200s(capfd, how, block):
    for count in (1, 8):
        mesh, given = on_h200s(count, *[((8192 * 8, 1024), F32)] * 2)
        for f in (room.compressed_reduce_scatter, room.compressed_all_gather)[:count]:
            run = lambda x, e, f=f: f(x, e, "first", how, block)
            assert_fits(figures(capfd, mapped(run, mesh), *given))


# -- on a GPU -------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU is here")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_on_a_gpu_virtual_ranks_keep_what_was_given(size, how):
    ring, tuning = VirtualRing(size), room.Tuning(blocks=16)  # all of them run at once
    x, error = pair((size, size, 4099, 256))
    run: Any = jax.jit(lambda x, e: compressed_kernel.scatter(ring, x, e, how, tuning))
    total, lost = run(x, error)
    np.testing.assert_allclose(total + lost.sum(axis=0), (x + error).sum(axis=0), atol=1e-4)
    for found, again in zip(run(x, error), (total, lost), strict=True):
        np.testing.assert_array_equal(found, again)
    run = jax.jit(lambda x, e: compressed_kernel.gather(ring, x, e, how, tuning))
    whole, lost = run(x[:, 0], error[:, 0])
    np.testing.assert_allclose(whole + lost[None], jnp.stack([(x + error)[:, 0]] * size), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU is here")
@pytest.mark.parametrize("how", HOW)
def test_on_all_gpus_of_a_host_the_kernels_equal_the_plain_forms(how):
    mesh = mesh_of(jax.device_count())
    x, error = pair((mesh.size * mesh.size * 1024, 768))
    for name in ("compressed_reduce_scatter", "compressed_all_gather"):
        forms = (partial(getattr(where, name), axis="first", how=how) for where in (room, plain))
        (found, lost), (expected, _) = (on_devices(f, mesh, x, error) for f in forms)
        # Where a tie goes another way a code differs, and what was lost with it.
        assert np.mean(np.abs(found - expected) > 1e-5) < 1e-4
        assert np.isfinite(lost).all()
