"""AdamW on a shard in one pass: equal to optax, in place, any number of elements."""

from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from hfjax.pallas_kernels import adamw as room
from hfjax.pallas_kernels.adamw import AdamW, Tuning, adamw_shard, numbers, refuses
from tests.h200 import OPTIMIZED, h200s
from tests.kernels import assert_fits, figures, interpreted, lowered, normal, relative

__all__ = ["interpreted"]
RATE, B1, B2, EPS = 1e-2, 0.9, 0.95, 1e-8
BLOCK = Tuning().elements
BF16 = jnp.bfloat16


def settings(weight_decay=0.1, cast=BF16):
    return AdamW(B1, B2, EPS, weight_decay, cast)


def corrections(step):
    return 1 - jnp.float32(B1) ** step, 1 - jnp.float32(B2) ** step


class Held(NamedTuple):
    parameter: Any
    mean: Any
    variance: Any
    gradient: Any


def held(seed, shape, gradient: Any = jnp.float32, mean: Any = jnp.float32):
    p, m, v, g = (normal(seed + i, shape) for i in range(4))
    return Held(p, m.astype(mean), v * v, g.astype(gradient))


def wanted(arrays, scale=1.0, step=3, weight_decay=0.1):
    """The same step in optax, in float64."""
    with jax.enable_x64(True):
        parameter, mean, variance, gradient = (jnp.asarray(x, jnp.float64) for x in arrays)
        optimizer: Any = optax.adamw(RATE, B1, B2, EPS, weight_decay=weight_decay)
        adam, *rest = optimizer.init(parameter)
        adam = adam._replace(mu=mean, nu=variance, count=jnp.int32(step - 1))
        moves, (adam, *_) = optimizer.update(gradient * scale, (adam, *rest), parameter)
        return [np.asarray(x) for x in (parameter + moves, adam.mu, adam.nu)]


# -- the plain form -------------------------------------------------------------------------


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_five_steps_of_the_plain_form_are_those_of_optax(weight_decay):
    optimizer: Any = optax.adamw(RATE, B1, B2, EPS, weight_decay=weight_decay)
    parameter: Any = normal(0, (33, 7))
    state, mine = optimizer.init(parameter), (parameter, jnp.zeros((33, 7)), jnp.zeros((33, 7)))
    for step in range(1, 6):
        gradient = normal(step, (33, 7))
        moves, state = optimizer.update(gradient, state, parameter)
        parameter = optax.apply_updates(parameter, moves)
        known = numbers(1.0, RATE, corrections(step))
        mine = room.reference(*mine, gradient, known, settings(weight_decay))[:3]
    for found, expected in zip(mine, (parameter, state[0].mu, state[0].nu), strict=True):
        assert relative(found, expected) < 1e-6


def test_without_a_cast_there_is_none():
    new = room.reference(*held(0, (3,)), numbers(1, RATE, corrections(1)), settings(cast=None))
    assert new.cast is None


# -- the kernel in the interpreter ----------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [(1,), (255,), (5, 51, 3), (256,), (257,), (BLOCK,), (2, BLOCK // 2), (2 * BLOCK + 259,)],
    ids=str,
)
def test_any_number_of_elements_is_updated_as_optax_does(interpreted, shape):
    arrays = held(7, shape)
    new = jax.jit(adamw_shard, static_argnums=5)(
        *arrays, numbers(0.5, RATE, corrections(3)), settings()
    )
    for found, expected in zip(new, wanted(arrays, 0.5), strict=False):
        assert relative(found, expected) < 1e-6
    assert new.cast.shape == shape
    assert (new.cast == new.parameter.astype(BF16)).all()


F32 = jnp.float32
EVERY_DAY = [
    (F32, F32, None),
    (F32, BF16, BF16),
    (BF16, F32, BF16),
    (BF16, BF16, None),
]  # all pairs


@pytest.mark.parametrize(
    ("mean", "gradient", "cast"),
    [
        pytest.param(*dtypes, marks=[] if dtypes in EVERY_DAY else pytest.mark.slow)
        for dtypes in product((F32, BF16), (F32, BF16), (None, BF16))
    ],
)
def test_every_dtype_offered(interpreted, mean, gradient, cast):
    arrays = held(1, (BLOCK + 300,), gradient, mean)
    known = numbers(1.0, RATE, corrections(3))
    new: Any = adamw_shard(*arrays, known, settings(0.0, cast))
    assert [x.dtype for x in new[:3]] == [jnp.float32, mean, jnp.float32]
    for found, expected in zip(new, wanted(arrays, weight_decay=0.0), strict=False):
        assert relative(found, expected) < (1e-6 if found.dtype == jnp.float32 else 1e-2)
    plain = room.reference(*arrays, known, settings(0.0, cast))
    for found, expected in zip(jax.tree.leaves(new), jax.tree.leaves(plain), strict=True):
        assert relative(found, expected) < (1e-6 if found.dtype == jnp.float32 else 1e-3)


@pytest.mark.parametrize("form", ["reference", "kernel"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_does_not_count_keeps_every_bit(request, form, bad):
    run = room.reference
    if form == "kernel":
        request.getfixturevalue("interpreted")
        run = adamw_shard
    arrays = held(2, (BLOCK + 77,))
    arrays = arrays._replace(gradient=arrays.gradient.at[5].set(bad).at[-1].set(bad))
    new = run(*arrays, numbers(bad, RATE, corrections(2), jnp.bool_(False)), settings())
    for found, before in zip(new[:3], arrays[:3], strict=True):
        assert (found == before).all()
    assert (new.cast == arrays[0].astype(BF16)).all()


@pytest.mark.parametrize("vectors", [1, 4])
def test_how_the_work_is_cut_up_makes_no_difference(interpreted, vectors):
    arrays, known = held(3, (4097,)), numbers(1.0, RATE, corrections(1))
    new = adamw_shard(*arrays, known, settings(), Tuning(vectors))
    for found, expected in zip(new, adamw_shard(*arrays, known, settings()), strict=True):
        assert (found == expected).all()


def test_a_shard_is_updated_where_it_lies(interpreted):
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    arrays, known = held(4, (2, BLOCK)), numbers(1.0, RATE, corrections(3))
    own = P("x")
    run = lambda *given: adamw_shard(*given, settings=settings())
    places = {"in_specs": (own, own, own, own, P()), "out_specs": own}
    new = jax.jit(jax.shard_map(run, mesh=mesh, check_vma=False, **places))(*arrays, known)
    for found, expected in zip(new, wanted(arrays), strict=False):
        assert relative(found, expected) < 1e-6


# -- what it refuses ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "told"),
    [
        ("parameter", BF16, r"parameter is bfloat16\[4\]: the kernel takes float32. Keep it so"),
        ("variance", BF16, r"variance is bfloat16\[4\]: the kernel takes float32"),
        (
            "gradient",
            jnp.float16,
            r"gradient is float16\[4\]: the kernel takes float32 or bfloat16",
        ),
    ],
    ids=["parameter", "variance", "gradient"],
)
def test_other_dtypes_are_refused(name, dtype, told):
    arrays = held(0, (4,))
    arrays = arrays._replace(**{name: getattr(arrays, name).astype(dtype)})
    with pytest.raises(ValueError, match=told):
        adamw_shard(*arrays, numbers(1.0, RATE, corrections(1)))


def test_shards_of_other_shapes_and_empty_ones_are_refused():
    x, other = jnp.zeros((4, 2)), jnp.zeros((2, 4))
    assert refuses(x, x, x, x) is None
    with pytest.raises(ValueError, match=r"gradient has shape \[2, 4\], parameter \[4, 2\]"):
        adamw_shard(x, x, x, other, jnp.zeros(5))
    assert "from 1 to 2147483647 elements" in str(refuses(*[jnp.zeros((0, 3))] * 4))


# -- compiled for GPUs that are not here ----------------------------------------------------


@pytest.mark.parametrize("size", [BLOCK, 1000, 300], ids=str)
def test_it_lowers_for_cuda_with_its_state_in_place(size):
    text = lowered(
        lambda *given: adamw_shard(*given, settings=settings()),
        *held(0, (size,)),
        numbers(1.0, RATE, corrections(1)),
    )
    assert text.count("output_operand_alias<") == 3


def on_h200(size, gradient=jnp.float32):
    where = NamedSharding(Mesh(np.array(h200s(1)), ("x",)), P())
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    arrays = jax.eval_shape(lambda: held(0, (size,), gradient))
    return [shape(x) for x in (*arrays, jax.ShapeDtypeStruct((5,), jnp.float32))]


@pytest.mark.cuda
@pytest.mark.parametrize("gradient", [jnp.float32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("size", [BLOCK, BLOCK + 77], ids=["even", "ragged"])
def test_it_compiles_for_an_h200_without_spills(capfd, size, gradient):
    run = lambda *given: adamw_shard(*given, settings=settings())
    found = figures(capfd, run, *on_h200(size, gradient))
    with capfd.disabled():
        assert_fits(found)


@pytest.mark.cuda
@pytest.mark.parametrize("size", [1 << 20, 1000003], ids=["even", "ragged"])
def test_what_is_given_up_is_updated_without_a_copy(size):
    run = jax.jit(lambda *given: adamw_shard(*given, settings=settings()), donate_argnums=(0, 1, 2))
    compiled: Any = run.lower(*on_h200(size)).compile(compiler_options=OPTIMIZED)
    assert " copy(" not in compiled.as_text()
    assert "copy-start" not in compiled.as_text()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 3 * 4 * size
    assert memory.temp_size_in_bytes < 4096  # descriptors of copies


# -- on a GPU -------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU is here")
@pytest.mark.parametrize("shape", [(1,), (257,), (1000003,), (50257, 768), (4096, 4096)], ids=str)
def test_on_a_gpu_it_equals_the_plain_form(shape):
    arrays, known = held(5, shape), numbers(0.7, RATE, corrections(9))
    plain = jax.jit(lambda *given: room.reference(*given, settings=settings()))(*arrays, known)
    run = jax.jit(lambda *given: adamw_shard(*given, settings=settings()), donate_argnums=(0, 1, 2))
    new: Any = run(*arrays, known)
    for found, expected in zip(new, plain, strict=True):
        assert relative(found, expected) < (1e-6 if found.dtype == jnp.float32 else 1e-3)
