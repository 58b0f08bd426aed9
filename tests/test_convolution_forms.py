"""A convolution in other forms is XLA's, in value and derivatives, and joins no rows."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.models.vision import convolution_forms
from hfjax.models.vision.convolution_forms import (
    FORMS,
    Window,
    as_one,
    convolve,
    on_a_gpu,
    quickest,
)
from hfjax.target import GPUS

# images, kernel, stride, padding, dilation, groups
CASES: dict[str, tuple[Any, ...]] = {
    "one place": ((2, 5, 4, 6), (1, 1, 6, 3), 1, 0, 1, 1),
    "one place, strided": ((2, 5, 6, 3), (1, 1, 3, 4), 2, 0, 1, 1),
    "same size": ((2, 5, 6, 3), (3, 3, 3, 4), 1, 1, 1, 1),
    "strided, odd and even": ((2, 7, 6, 3), (3, 3, 3, 4), 2, 1, 1, 1),
    "a stem": ((1, 15, 14, 3), (7, 7, 3, 2), 2, 3, 1, 1),
    "uneven all over": ((1, 8, 5, 2), (2, 3, 2, 3), (3, 1), ((2, 0), (0, 1)), (1, 2), 1),
    "cropped": ((1, 8, 7, 2), (3, 2, 2, 3), 1, ((-1, 1), (0, -2)), 1, 1),
    "dilated": ((1, 9, 9, 3), (3, 3, 3, 2), 1, 4, 4, 1),
    "dilated beyond the image": ((1, 5, 5, 3), (3, 3, 3, 2), 1, 6, 6, 1),
    "padding alone": ((1, 2, 2, 2), (1, 1, 2, 3), 4, 3, 1, 1),
    "groups": ((2, 5, 6, 6), (3, 3, 2, 9), 1, 1, 1, 3),
    "groups that do not divide": ((1, 5, 5, 40), (3, 3, 8, 10), 2, 1, 1, 5),
    "wide groups, dilated": ((1, 5, 5, 80), (3, 3, 40, 4), 1, 4, 4, 2),
    "depthwise": ((2, 5, 6, 7), (3, 3, 1, 7), 2, ((0, 1), (2, 1)), 1, 7),
    "depthwise, each twice": ((1, 5, 6, 7), (3, 3, 1, 14), 1, 1, 1, 7),
    "nothing comes out": ((1, 2, 2, 2), (3, 3, 2, 2), 1, 0, 1, 1),
}


def drawn(images, kernel, dtype: Any = float):
    return tuple(
        jax.random.normal(jax.random.key(i), s, dtype) for i, s in enumerate((images, kernel))
    )


def window(stride, padding, dilation, groups):
    both = lambda n: (n, n) if isinstance(n, int) else n
    pads = ((padding, padding),) * 2 if isinstance(padding, int) else padding
    return Window(both(stride), pads, both(dilation), groups)


def fitting(kernel, groups):
    """The forms but XLA's that compute so many groups."""
    if groups == 1:
        return ["joined", "shifted", "patches"]
    return ["joined", "each"] if kernel[2] == 1 and kernel[3] == groups else ["joined"]


@pytest.mark.short("depthwise, each twice")
@pytest.mark.parametrize("name", CASES)
def test_each_form_has_the_values_and_gradients_of_xla(name):
    images, kernel, *how = CASES[name]
    with jax.enable_x64(True):
        x, k = drawn(images, kernel)

        def all_of(form):
            run = jax.jit(lambda *given: jax.vjp(lambda x, k: form(x, k, window(*how)), *given))
            out, back = run(x, k)
            return out, *back(jnp.cos(jnp.arange(out.size)).reshape(out.shape))

        wanted = all_of(FORMS["as_one"])
        for form in fitting(kernel, how[-1]):
            for found, right in zip(all_of(FORMS[form]), wanted, strict=True):
                assert found.dtype == right.dtype
                np.testing.assert_allclose(found, right, rtol=1e-12, atol=1e-12, err_msg=form)


@pytest.mark.parametrize("name", ["groups", "depthwise", "dilated", "strided, odd and even"])
@pytest.mark.short("dilated")
def test_second_derivatives_and_vmap_are_those_of_xla(name):
    images, kernel, *how = CASES[name]
    with jax.enable_x64(True):
        x, k = drawn(images, kernel)

        def both(form):
            energy = lambda x, k: jnp.sum(jnp.tanh(form(x, k, window(*how))))
            slope = lambda x, k: jnp.sum(jax.grad(energy, 1)(x, k) ** 2)
            forward = jax.jvp(slope, (x, k), (jnp.cos(x), jnp.cos(k)))[1]
            many = jax.vmap(form, (0, 0, None))(
                jnp.stack([x, 2 * x]), jnp.stack([k, jnp.sin(k)]), window(*how)
            )
            return *jax.grad(slope, (0, 1))(x, k), forward, many

        wanted = jax.jit(lambda: both(FORMS["as_one"]))()
        for form in fitting(kernel, how[-1]):
            found = jax.jit(lambda form=form: both(FORMS[form]))()
            for one, right in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one, right, rtol=1e-11, atol=1e-11, err_msg=form)


@pytest.mark.parametrize("name", ["groups", "depthwise", "dilated"])
def test_half_precision_is_summed_in_float32_and_comes_out_as_it_came_in(name):
    images, kernel, *how = CASES[name]
    x, k = (a.astype(jnp.bfloat16) for a in drawn(images, kernel))
    wide = FORMS["as_one"](x.astype(jnp.float32), k.astype(jnp.float32), window(*how))
    for form in fitting(kernel, how[-1]):
        run = jax.jit(lambda x, k, form=form: FORMS[form](x, k, window(*how)))
        found, back = jax.vjp(run, x, k)
        assert {found.dtype, *(g.dtype for g in back(found))} == {jnp.dtype(jnp.bfloat16)}
        np.testing.assert_allclose(found.astype(jnp.float32), wide, rtol=2**-7, atol=2**-7)


CHOSEN = {  # as networks have them: images, kernel, what is chosen
    "joined": ((4, 28, 28, 104), (3, 3, 8, 104), Window(padding=((1, 1), (1, 1)), groups=13)),
    "each": ((4, 14, 14, 192), (3, 3, 1, 192), Window(padding=((1, 1), (1, 1)), groups=192)),
    "as_one": ((4, 28, 28, 128), (3, 3, 128, 128), Window(padding=((1, 1), (1, 1)))),
    "patches": ((4, 7, 7, 512), (3, 3, 512, 512), Window(padding=((1, 1), (1, 1)))),
    "shifted": (
        (4, 17, 17, 2048),
        (3, 3, 2048, 256),
        Window(padding=((12, 12), (12, 12)), dilation=(12, 12)),
    ),
}


@pytest.mark.parametrize("form", CHOSEN)
def test_the_form_goes_by_the_shapes(form):
    assert quickest(*CHOSEN[form]) == form


def test_a_kernel_of_one_place_is_a_product():
    assert quickest((4, 56, 56, 64), (1, 1, 64, 256), Window()) == "shifted"


def traced(name, back=True, platform=None):
    """Lower a convolution and its derivatives, for the devices of a mesh."""
    images, kernel, stride, padding, dilation, groups = CASES[name]
    x, k = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (images, kernel))
    run = lambda x, k: convolve(x, k, stride, padding, dilation, groups)
    grads = jax.grad(lambda x, k: jnp.sum(run(x, k) ** 2), (0, 1))
    return jax.jit(grads if back else run).trace(x, k)


def test_on_cpus_no_convolution_has_groups():
    """XLA's gradient of one is a convolution in groups of the batch, which runs in a plain loop."""
    for name in ("groups", "groups that do not divide", "depthwise"):
        text = traced(name).lower().as_text()
        counts = re.findall(r"(?:batch|feature)_group_count = (\d+)", text)
        assert set(counts) <= {"1"}, name
        compiled = str(traced(name).lower().compile().as_text())
        assert not re.search(r"group_count=\d", compiled), name
        assert ("convolution(" in compiled) == (name != "depthwise")
    product = traced("one place, strided").lower().compile().as_text()
    assert "convolution(" not in str(product)


@pytest.mark.parametrize("name", ["groups", "one place", "dilated beyond the image"])
def test_for_gpus_it_is_one_convolution_of_xla(name):
    gpu = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=GPUS["h200"])
    with jax.sharding.use_abstract_mesh(gpu):
        alone, back = traced(name, back=False), traced(name)
    text = alone.lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"stablehlo\.(\w+)", text) == ["convolution"]
    assert back.lower(lowering_platforms=("cuda",)).as_text().count("stablehlo.convolution") == 3


# -- in a step ------------------------------------------------------------------------


class Images(nnx.Module):
    """A small network of each form."""

    def __init__(self, rngs: nnx.Rngs):
        kernel = lambda *shape: nnx.Param(0.1 * jax.random.normal(rngs.params(), shape))
        self.stem, self.one = kernel(3, 3, 3, 16), kernel(1, 1, 16, 16)
        self.grouped, self.dilated = kernel(3, 3, 2, 16), kernel(3, 3, 128, 128)
        self.alone, self.many = kernel(3, 3, 1, 16), kernel(3, 3, 16, 256)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(convolve(x, self.stem[...], padding=1))
        x = x + nnx.relu(convolve(x, self.one[...]))
        x = x + nnx.relu(convolve(x, self.grouped[...], padding=1, groups=8))
        x = x + nnx.relu(convolve(x, self.alone[...], padding=1, groups=16))
        wide = convolve(jnp.tile(x, 8), self.dilated[...], padding=6, dilation=6)
        return convolve(x + wide[..., ::8], self.many[...], stride=(4, 4)).mean((1, 2))


def test_in_a_step_on_eight_devices_each_works_on_its_rows(monkeypatch):
    taken = []
    choose = convolution_forms.quickest
    monkeypatch.setattr(
        convolution_forms, "quickest", lambda *x: taken.append(choose(*x)) or taken[-1]
    )
    forward = lambda model, batch: model(batch["x"])
    loss = lambda outputs, batch: jnp.mean((outputs - batch["y"]) ** 2)
    draw = np.random.default_rng(0).standard_normal
    batch = {"x": draw((8, 8, 8, 3), np.float32), "y": draw((8, 256), np.float32)}
    found, metrics = [], dict[str, Any]()
    for count in (1, 8):
        mesh = hfjax.make_mesh(data=count, devices=jax.devices()[:count])
        layout = hfjax.layout(Images, optax.sgd(0.01), mesh, hfjax.DDP, forward=forward)
        step, state = hfjax.train_step(layout, loss, rows="strict"), hfjax.init(layout)
        for _ in range(2):
            state, metrics = step(state, batch)
        found.append((metrics["loss"], hfjax.full(state.params)))
        assert str(step.rows) == "no rows meet"
    assert set(taken) == set(FORMS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *found)


@pytest.mark.short("size0-3", "size1-12", "size1-3", "size0-12")
@pytest.mark.parametrize("rate", [2, 3, 12])
@pytest.mark.parametrize("size", [(9, 9), (8, 13)])
def test_on_a_gpu_the_gradient_of_a_dilated_kernel_is_that_of_a_plain_one(rate, size):
    window = Window(padding=((rate, rate),) * 2, dilation=(rate, rate))
    draw = np.random.default_rng(3)
    with jax.enable_x64(True):
        x, kernel = draw.normal(size=(2, *size, 3)), draw.normal(size=(3, 3, 3, 4))
        total = lambda form: lambda x, k: (jnp.sin(form(x, k, window)) ** 2).sum()
        both = lambda form: jax.grad(total(form), (0, 1))(x, kernel)
        for got, wanted in zip(both(on_a_gpu), both(as_one), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-11)
        again = lambda form: jax.grad(lambda k: (jax.grad(total(form))(x, k) ** 2).sum())(kernel)
        np.testing.assert_allclose(again(on_a_gpu), again(as_one), rtol=1e-9, atol=1e-9)


def test_that_form_runs_on_each_device_s_rows(monkeypatch):
    """As if the mesh were of GPUs: nothing is gathered, and the step is that of one device."""
    monkeypatch.setattr(convolution_forms.current_platform, "platform", lambda: "gpu")
    x = np.random.default_rng(0).normal(size=(8, 9, 9, 3)).astype(np.float32)
    init = lambda rngs: {"kernel": jax.random.normal(rngs.params(), (3, 3, 3, 4))}
    loss = lambda tree, x: (convolve(x, tree["kernel"], 1, 2, 2) ** 2).mean()
    states = []
    for count in (1, 8):
        mesh = hfjax.make_mesh(data=count, devices=jax.devices()[:count])
        layout = hfjax.layout(init, optax.sgd(0.1), mesh, hfjax.DDP)
        step = hfjax.train_step(layout, loss, rows="strict")
        states.append(step(hfjax.init(layout), x)[0])
        assert "gathered" not in str(step.rows)
    one, eight = (np.asarray(state.params["kernel"]) for state in states)
    np.testing.assert_allclose(one, eight, rtol=1e-5, atol=1e-6)
