"""A convolution is one of XLA's; the gradient of a dilated kernel is that of a plain one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import hfjax
from hfjax.analysis.targets import GPUS
from hfjax.models.vision.convolutions import convolve

# images, kernel, stride, dilation, groups
CASES = {
    "one place": ((2, 5, 4, 6), (1, 1, 6, 3), 1, 1, 1),
    "strided": ((1, 15, 14, 3), (7, 7, 3, 2), 2, 1, 1),
    "groups": ((2, 5, 6, 6), (3, 3, 2, 9), 1, 1, 3),
    "dilated beyond the image": ((1, 5, 5, 3), (3, 3, 3, 2), 1, 6, 1),
    "dilated, uneven": ((1, 9, 8, 3), (3, 2, 3, 2), 1, 2, 1),
}


def of_xla(x, kernel, stride=1, dilation=1, groups=1):
    around = [(dilation * (n - 1) // 2,) * 2 for n in kernel.shape[:2]]
    return lax.conv_general_dilated(
        x, kernel, (stride,) * 2, around, rhs_dilation=(dilation,) * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_for_gpus_it_is_one_convolution_of_xla(name):
    images, kernel, *how = CASES[name]
    x, k = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (images, kernel))
    run = lambda x, k: convolve(x, k, *how)
    grads = jax.grad(lambda x, k: jnp.sum(run(x, k) ** 2), (0, 1))
    gpu = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=GPUS["h200"])
    with jax.sharding.use_abstract_mesh(gpu):
        alone, back = jax.jit(run).trace(x, k), jax.jit(grads).trace(x, k)
    text = alone.lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"stablehlo\.(\w+)", text) == ["convolution"]
    assert back.lower(lowering_platforms=("cuda",)).as_text().count("stablehlo.convolution") == 3


@pytest.mark.parametrize("rate", [2, 3, 12])
@pytest.mark.parametrize("size", [(9, 9), (8, 13)])
def test_the_gradient_of_a_dilated_kernel_is_that_of_a_plain_one(rate, size):
    draw = np.random.default_rng(3)
    with jax.enable_x64(True):
        x, kernel = draw.normal(size=(2, *size, 3)), draw.normal(size=(3, 3, 3, 4))
        total = lambda form: lambda x, k: (jnp.sin(form(x, k, dilation=rate)) ** 2).sum()
        both = lambda form: jax.grad(total(form), (0, 1))(x, kernel)
        for got, wanted in zip(both(convolve), both(of_xla), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-11)
        again = lambda form: jax.grad(lambda k: (jax.grad(total(form))(x, k) ** 2).sum())(kernel)
        np.testing.assert_allclose(again(convolve), again(of_xla), rtol=1e-9, atol=1e-9)


def test_that_form_runs_on_each_device_s_rows():
    """Nothing is gathered, and the step is that of one device."""
    x = np.random.default_rng(0).normal(size=(8, 9, 9, 3)).astype(np.float32)
    init = lambda rngs: {"kernel": jax.random.normal(rngs.params(), (3, 3, 3, 4))}
    loss = lambda tree, x: (convolve(x, tree["kernel"], dilation=2) ** 2).mean()
    states = []
    for count in (1, 8):
        mesh = hfjax.make_mesh(data=count, devices=jax.devices()[:count])
        layout = hfjax.layout(init, optax.sgd(0.1), mesh, hfjax.DDP)
        step = hfjax.train_step(layout, loss, batch_view="strict")
        states.append(step(hfjax.init(layout), x)[0])
        assert "gathered" not in str(step.batch_comms)
    one, eight = (np.asarray(state.params["kernel"]) for state in states)
    np.testing.assert_allclose(one, eight, rtol=1e-5, atol=1e-6)
