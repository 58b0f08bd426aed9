"""Models with explicit sharding run as they are, equal to one device.

The oracle is the same model on a mesh of one device whose axes are Explicit.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import hfjax
from hfjax.parallel.adapters.model_template import make_rngs

DIM, HIDDEN, VOCAB, LAYERS = 16, 32, 24, 2
SGD = optax.sgd(0.05, momentum=0.9)
BATCH = {"tokens": np.random.default_rng(0).integers(0, VOCAB, (8, 6)).astype("int32")}
AXES = {
    "tokens": ("vocab", "embed"),
    "up": ("layers", "embed", "mlp"),
    "down": ("layers", "mlp", "embed"),
    "scale": ("layers", "embed"),
}
STRATEGIES = {
    "one device": (hfjax.DDP, {"data": 1}),
    "DDP": (hfjax.DDP, {"data": 8}),
    "ZeRO-2": (hfjax.ZERO2, {"data": 4}),
    "FSDP": (hfjax.FSDP, {"fsdp": 8}),
    "HSDP": (hfjax.HSDP, {"data": 2, "fsdp": 2}),
    "TENSOR": (hfjax.TENSOR, {"tensor": 2}),
    "FSDP | TENSOR": (hfjax.FSDP | hfjax.TENSOR, {"fsdp": 2, "tensor": 2}),
}
OWN_NAMES = {"x": "data", "y": "tensor"}


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def init(rngs, x="x", y="y"):
    """Return the parameters of a small language model; initializers place them."""
    draw = partial(jax.random.normal, dtype=jnp.float64)
    return {
        "tokens": draw(rngs.params(), (VOCAB, DIM), out_sharding=P(y, x)),
        "up": draw(rngs.params(), (LAYERS, DIM, HIDDEN), out_sharding=P(None, x, y)) / 4,
        "down": draw(rngs.params(), (LAYERS, HIDDEN, DIM), out_sharding=P(None, y, x)) / 6,
        "scale": jnp.ones((LAYERS, DIM), jnp.float64, out_sharding=P(None, None)),
    }


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def cube(x, y, h):
    """Return h**3, with a derivative of its own that is half of it, and places what it returns."""
    return jax.sharding.reshard(h**3, P(x, None, y))


cube.defvjp(
    lambda x, y, h: (cube(x, y, h), h),
    lambda x, y, h, g: (jax.sharding.reshard(1.5 * g * h**2, P(x, None, y)),),
)


def forward(params, batch, x="x", y="y"):
    """Return logits; every operation that may say how its result is sharded does."""
    reshard, activations = jax.sharding.reshard, P(x, None, None)
    h = params["tokens"].at[batch["tokens"]].get(out_sharding=activations)

    @jax.checkpoint
    def layer(h, weights):
        up, down, scale = weights
        normed = h * jax.lax.rsqrt((h**2).mean(-1, keepdims=True) + 1e-6) * scale[None, None]
        wide = jnp.einsum("bsd,df->bsf", normed, up, out_sharding=P(x, None, y))
        wide = jax.nn.silu(wide) + jnp.asarray(cube(x, y, jnp.tanh(wide)))
        out = jax.lax.dot_general(wide, down, (((2,), (0,)), ((), ())), out_sharding=activations)
        is_large = jnp.abs(scale).sum() > 1
        out = jax.lax.cond(
            is_large, lambda z: reshard(2 * z, P(x)), lambda z: reshard(z, P(x)), out
        )
        assert (
            jax.sharding.get_abstract_mesh().shape[x] == jax.typeof(h).sharding.mesh.shape[x] == 1
        )
        return h + out, None

    stack = params["up"], params["down"], params["scale"]
    h = jax.lax.scan(layer, reshard(h, activations), stack)[0]
    positions = jax.lax.broadcasted_iota(jnp.float64, h.shape, 1, out_sharding=activations)
    h = (h + positions / 100).at[:, 0].multiply(2.0, out_sharding=activations)
    logits = jnp.einsum("bsd,vd->bsv", h, params["tokens"], out_sharding=P(x, None, y))
    center = lambda z: z - z.mean(-1, keepdims=True)
    return jax.sharding.auto_axes(center, out_sharding=P(x, None, y))(logits)


def loss(logits, batch, x="x"):
    logits = jax.sharding.reshard(logits, P(x))
    targets = jnp.take_along_axis(logits, batch["tokens"][..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - targets).mean()


def on_one_device(init, forward, loss, batch=BATCH, names=("x", "y"), steps=2):
    """Return [loss, norm of the gradient, ...] of plain JAX on a mesh of one device, and params."""
    types = (AxisType.Explicit,) * len(names)
    mesh = jax.make_mesh((1,) * len(names), names, types, devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        params, numbers = init(make_rngs(0)), []
        state = SGD.init(params)

        @jax.jit
        def step(params, state):
            compute = lambda params: loss(forward(params, batch), batch)
            value, gradients = jax.value_and_grad(compute)(params)
            updates, state = SGD.update(gradients, state, params)
            norm = optax.global_norm(gradients)
            return optax.apply_updates(params, updates), state, (value, norm)

        for _ in range(steps):
            params, state, metrics = step(params, state)
            numbers += map(float, metrics)
        return numbers, jax.tree.map(np.asarray, params)


def build(strategy, sizes, init=init, forward=forward, loss=loss, execution=None, **options):
    """Return a layout and its step."""
    sizes_of_all = hfjax.make_mesh(**sizes, devices=jax.devices()[: np.prod([*sizes.values()])])
    edited = strategy.edit(replicate_below=0)
    layout = hfjax.layout(init, SGD, sizes_of_all, edited, forward=forward, **options)
    return layout, hfjax.train_step(layout, loss, **execution or {})


def train(layout, step, batch=BATCH, steps=2):
    state, numbers = hfjax.init(layout), []
    for _ in range(steps):
        state, metrics = step(state, batch)
        numbers += [float(metrics["loss"]), float(metrics["grad_norm"])]
    return numbers, jax.tree.map(np.asarray, state.params)


def assert_equal(trained, expected):
    np.testing.assert_allclose(trained[0], expected[0], rtol=1e-10)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12), *(trained[1], expected[1])
    )


@pytest.fixture(scope="module")
def expected():
    with jax.enable_x64(True):
        return on_one_device(init, forward, loss)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_model_with_explicit_sharding_equals_one_device(name, expected):
    layout, step = build(*STRATEGIES[name], axes=AXES, mesh_axes=OWN_NAMES)
    assert_equal(train(layout, step), expected)
