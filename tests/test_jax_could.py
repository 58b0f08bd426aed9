"""What explicit sharding cannot do yet: programs that would make hfjax's partitioner superfluous.

A model is written for one device and annotates nothing. Where JAX would have to choose a sharding,
explicit sharding raises. Each xfail is strict: it fails once JAX runs the program; then a part of
parallel/spmd may go (docs/design.md).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

X = np.arange(16 * 8, dtype=np.float32).reshape(16, 8) / 100
W = np.ones((8, 8), np.float32)
could = partial(pytest.mark.xfail, strict=True)


@pytest.fixture(autouse=True)
def mesh():
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def batch(x=X):
    """Return examples over the axis data."""
    return jax.reshard(x, P("data", *[None] * (x.ndim - 1)))


def weight(x):
    """Return a weight whose gradient is a sum over data that has not been made yet."""
    return jax.reshard(jnp.asarray(x), P(*[None] * x.ndim, reduced=frozenset({"data"})))


def gradient(loss, *weights):
    """Return the sharding of each gradient: not reduced over data."""
    found = jax.jit(jax.grad(loss, range(len(weights))))(*map(weight, weights))
    return [jax.typeof(x).sharding.spec.unreduced for x in found]


def test_a_product_and_its_gradient_work():
    assert gradient(lambda w: (batch() @ w).sum(), W) == [{"data"}]


@could()
def test_a_bias_would():
    assert gradient(lambda w, b: (batch() @ w + b).sum(), W, W[:1]) == [{"data"}] * 2


@could()
def test_an_embedding_would():
    tokens = jax.reshard(np.arange(16) % 8, P("data"))
    assert gradient(lambda table: table[tokens].sum(), W) == [{"data"}]


@could()
def test_the_scale_of_a_norm_would():
    assert gradient(lambda scale: (batch() * scale).sum(), W[:1]) == [{"data"}]


PROGRAMS = {
    "each example against all": lambda x: x @ x.T,
    "examples by number": lambda x: x[jnp.array([3, 1, 2, 0])],
    "examples in another order": lambda x: jnp.sort(x, 0),
    "examples one further": lambda x: jnp.roll(x, 1, 0),
    "sums of segments": lambda x: jax.ops.segment_sum(x, jnp.arange(16) // 4, 4),
    "a loop over examples": lambda x: jax.lax.scan(lambda c, row: (c + row, None), jnp.zeros(8), x)[
        0
    ],
}


@could()
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_joins_examples_would(name):
    found = jax.jit(PROGRAMS[name])(batch())
    np.testing.assert_allclose(found, PROGRAMS[name](jnp.asarray(X)), rtol=1e-5)


@could()
def test_a_map_that_is_manual_over_one_axis_would_take_what_is_not_reduced(mesh):
    """As a pipeline is, manual over its stages only."""
    local = jax.shard_map(
        lambda x: x * 2, axis_names={"fsdp"}, in_specs=P("fsdp"), out_specs=P("fsdp")
    )
    loss = lambda w: local(jax.grad(lambda w: (batch() @ w).sum())(w)).sum()
    assert np.isfinite(jax.jit(loss)(weight(W)))
