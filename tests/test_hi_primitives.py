"""Operations that are objects (HiPrim), as jax 0.12 has them, are partitioned by what they hold.

Three flags of jax make them of remat, custom_jvp and custom_vjp; the same is sent with them on.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import hfjax

hijax = pytest.importorskip("jax.experimental.hijax")
FLAGS = [f"jax_{name}" for name in ("remat3", "custom_vjp3", "custom_jvp3")]
if not hasattr(hijax, "HiPrim") or not all(hasattr(jax.config, flag) for flag in FLAGS):
    pytest.skip("jax 0.12 has them", allow_module_level=True)
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(16, 8)).astype(np.float32)}
PARAMS = {
    name: (0.4 * RNG.normal(size=shape)).astype(np.float32)
    for name, shape in (("kernels", (3, 8, 8)), ("last", (8, 8)))
}
MESHES = {"DDP": (hfjax.DDP, "data"), "FSDP": (hfjax.FSDP.edit(replicate_below=0), "fsdp")}


@jax.custom_vjp
def wrong(x):
    return jnp.sin(x)


wrong.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (3 * g * x,))


def model(params, batch):
    """Loops, recomputed functions with and without a policy, names, rules of both kinds."""
    names = jax.checkpoint_policies.save_only_these_names("hidden")

    @jax.checkpoint
    def layer(x, w):
        return x + jax.nn.silu(checkpoint_name(wrong(jax.nn.relu(x @ w)), "hidden")), None

    x, _ = jax.lax.scan(layer, batch["x"], params["kernels"])
    last = lambda x, w: jax.nn.gelu(checkpoint_name(x @ w, "hidden"))
    return jax.checkpoint(last, policy=names)(x, params["last"])


def loss(outputs, batch):
    return (jax.nn.logsumexp(outputs, axis=-1) - wrong(outputs[:, 0])).mean()


def trained(function, loss, strategy=hfjax.DDP, **sizes):
    """Return the step, what it sends, and loss and parameters after it."""
    (n,) = sizes.values()
    mesh = hfjax.make_mesh(devices=jax.devices()[:n], **sizes)
    init = lambda rngs: jax.tree.map(jnp.asarray, PARAMS)
    layout = hfjax.layout(init, optax.sgd(0.1), mesh, strategy, forward=function)
    step = hfjax.train_step(layout, loss)
    sent = str(hfjax.collectives(step.lower(BATCH).compile()))
    state, metrics = step(hfjax.init(layout), BATCH)
    return step, sent, [metrics["loss"], hfjax.full_array(state.params)]


def in_plain_jax(function, loss):
    """Return the loss and the parameters after a step."""
    value, grads = jax.value_and_grad(lambda p: loss(function(p, BATCH), BATCH))(PARAMS)
    return [value, jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, grads)]


def check_close(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, wanted)


@pytest.fixture
def flags():
    """Return what turns the flags on or off."""
    before = {flag: getattr(jax.config, flag) for flag in FLAGS}
    yield lambda on: [jax.config.update(flag, on) for flag in FLAGS]
    for flag, value in before.items():
        jax.config.update(flag, value)


@pytest.mark.parametrize("case", MESHES)
def test_with_the_flags_on_the_same_is_sent_and_reported_and_rules_are_respected(flags, case):
    strategy, axis = MESHES[case]
    flags(False)
    step, sent, found = trained(model, loss, strategy, **{axis: 4})
    flags(True)
    step_on, sent_on, found_on = trained(model, loss, strategy, **{axis: 4})
    assert sent_on == sent
    assert str(step_on.batch_comms) == str(step.batch_comms)
    check_close(found_on, found)
    check_close(found_on, in_plain_jax(model, loss))


class Wrong(hijax.HiPrim):
    """sin, of which the derivative is said to be three times x."""

    def __init__(self, x):
        self.in_avals, self.out_aval, self.params = (x,), x, {}
        super().__init__()

    def expand(self, x):
        return jnp.sin(x)

    def vjp_fwd(self, nonzeros, x):
        return jnp.sin(x), x

    def vjp_bwd_retval(self, x, g):
        return (3 * g * x,)


def test_an_object_of_ones_own_and_those_of_jax_send_nothing_and_keep_their_derivatives():
    def function(params, batch):
        x = batch["x"] @ params["last"]
        mantissas, exponents = jnp.frexp(x)
        places = jnp.searchsorted(jnp.linspace(-1, 1, 5), x)
        return Wrong(jax.typeof(x))(x) + jnp.ldexp(mantissas, exponents) + 0.1 * places

    square = lambda outputs, batch: jnp.square(outputs).sum(1).mean()
    step, _, found = trained(function, square, data=4)
    assert not [e for e in step.batch_comms.comms if e.action == "gather"]
    check_close(found, in_plain_jax(function, square))
