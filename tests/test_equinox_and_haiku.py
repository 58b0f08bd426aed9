"""Models of equinox and Haiku train under a strategy as on one device.

The dev extra installs both, so a missing one is an error: a test that is skipped proves nothing.
"""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hfjax

RNG = np.random.default_rng(0)
BATCH = {name: RNG.normal(size=(16, 8)).astype(np.float32) for name in "xy"}


def of_equinox():
    model = lambda rngs: eqx.nn.MLP(8, 8, 16, 2, key=rngs.params())
    return model, lambda model, batch: jax.vmap(model)(batch["x"])


def of_haiku():
    net = hk.transform(lambda x: hk.nets.MLP([16, 8])(x))
    model = lambda rngs: net.init(rngs.params(), BATCH["x"])
    return model, lambda params, batch, key: net.apply(params, key, batch["x"])


@pytest.mark.slow
@pytest.mark.parametrize("make", [of_equinox, of_haiku])
def test_a_model_of_another_library_trains_as_on_one_device(make):
    (model, forward), runs = make(), []
    loss = lambda outputs, batch: jnp.mean((outputs - batch["y"]) ** 2)
    for count in (1, 4):
        mesh = hfjax.make_mesh(devices=jax.devices()[:count], fsdp=count)
        strategy = hfjax.FSDP.edit(replicate_below=0)
        layout = hfjax.layout(model, optax.adam(1e-2), mesh, strategy, forward=forward)
        step, state, losses = hfjax.train_step(layout, loss), hfjax.init(layout), []
        for _ in range(4):
            state, metrics = step(state, BATCH)
            losses.append(float(metrics["loss"]))
        runs.append(losses)
    assert runs[0][-1] < runs[0][0]
    np.testing.assert_allclose(runs[1], runs[0], rtol=1e-5)
