"""Models of images on many devices: as on one, and one message for each norm each way."""

import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.models.layers import run_stacked, stack_layers
from hfjax.models.vision.losses import classification_loss, segmentation_loss
from hfjax.models.vision.norms import BatchNorm
from hfjax.models.vision.preset_table import PRESETS
from hfjax.testing import assert_strategies_agree
from hfjax.weights.vision_rules import model_factory

ROWS = {
    "DDP": (hfjax.DDP, {"data": 8}),
    "ZERO1": (hfjax.ZERO1.edit(replicate_below=0), {"data": 4}),
    "ZERO2": (hfjax.ZERO2.edit(replicate_below=0), {"data": 2, "fsdp": 2}),
    "ZERO3": (hfjax.ZERO3.edit(replicate_below=0), {"fsdp": 8}),
    "HSDP": (hfjax.HSDP.edit(replicate_below=0), {"data": 2, "fsdp": 4}),
    "FSDP, remat": (hfjax.FSDP.edit(replicate_below=0), {"fsdp": 4}, {"remat": "full"}),
    "DDP, dots": (hfjax.DDP, {"data": 4}, {"remat": "dots"}),
}
SHARED: dict[str, Any] = {
    "TENSOR|SEQUENCE": (hfjax.TENSOR | hfjax.SEQUENCE, {"data": 2, "tensor": 2}),
    "PIPE": (hfjax.PIPE, {"pipe": 2, "data": 2}, {"schedule": hfjax.Schedule("1f1b", 2)}),
}
CONVOLUTIONS = ("resnet-tiny", "regnet-tiny", "deeplabv3-tiny")


def images(name, rows=16, classes=5, size=8):
    """Return images of bytes whose rows differ much in brightness, and labels."""
    draw = np.random.default_rng(7)
    bright = np.linspace(0, 200, rows).reshape(-1, 1, 1, 1)
    image = (bright + draw.uniform(0, 55, (rows, size, size, 3))).astype(np.uint8)
    shape = (rows, size, size) if name.startswith("deeplab") else (rows,)
    return {"image": image, "label": draw.integers(0, classes, shape)}


def loss_of(name):
    return segmentation_loss if name.startswith("deeplab") else classification_loss


def model(name, **changes):
    dropped = {"dropout": 0.0, "auxiliary_dropout": 0.0} if name.startswith("deeplab") else {}
    return model_factory(replace(PRESETS[name], **dropped, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ROWS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_loss_gradients_and_statistics_are_those_of_one_device(name, strategy):
    with jax.enable_x64(True):
        case = {strategy: ROWS[strategy]}
        found = assert_strategies_agree(model(name), loss_of(name), images(name), case, steps=2)
    assert max(found.values()) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_statistics_are_those_of_each_microbatch_in_order(name):
    """Two microbatches: those of one device, after which running statistics were mixed twice."""
    case = {"DDP": (hfjax.DDP, {"data": 4}), "FSDP": (hfjax.FSDP, {"data": 2, "fsdp": 2})}
    with jax.enable_x64(True):
        given = model(name), loss_of(name), images(name), case
        assert_strategies_agree(*given, steps=2, gradient_accumulation_steps=2)


@pytest.mark.slow
def test_two_microbatches_mix_running_statistics_twice():
    batch, mesh = images("resnet-tiny"), hfjax.make_mesh(data=8)
    layout = hfjax.layout(model("resnet-tiny"), optax.sgd(0.0), mesh, hfjax.DDP)
    state = hfjax.init(layout)
    module = hfjax.to_model(layout, state)
    module.train()
    for half in (slice(None, 8), slice(8, None)):
        module(jax.tree.map(lambda x, half=half: x[half], batch))
    step = hfjax.train_step(layout, classification_loss, gradient_accumulation_steps=2)
    found = hfjax.to_model(layout, step(state, batch)[0])
    there, here = (nnx.to_flat_state(nnx.state(m, nnx.BatchStat)) for m in (module, found))
    for (path, wanted), (_, got) in zip(there, here, strict=True):
        np.testing.assert_allclose(got[...], wanted[...], rtol=2e-4, atol=1e-5, err_msg=str(path))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet-tiny", "deeplabv3-tiny"])
def test_in_bfloat16_as_on_one_device_in_bfloat16(name):
    """Statistics are float32 there too; activations round, so the law is a looser one."""
    losses, means = list[float](), list[np.ndarray]()
    for devices, strategy in ((1, hfjax.DDP), (8, hfjax.DDP), (8, hfjax.FSDP)):
        axis = "fsdp" if strategy is hfjax.FSDP else "data"
        sizes: Any = {axis: devices}
        mesh = hfjax.make_mesh(devices=jax.devices()[:devices], **sizes)
        layout = hfjax.layout(model(name), optax.sgd(0.1), mesh, strategy)
        step = hfjax.train_step(layout, loss_of(name), precision="bf16")
        state, batch = hfjax.init(layout), images(name)
        state, _ = step(state, batch)
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        means.append(np.asarray(hfjax.to_model(layout, state).stem.norm.mean[...]))
        assert means[-1].dtype == np.float32
    np.testing.assert_allclose(losses[1:], losses[0], rtol=2e-2)
    np.testing.assert_allclose(means[1:], means[:1] * 2, rtol=2e-2, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SHARED)
def test_a_vit_takes_tensor_sequence_and_pipe(strategy):
    case = {strategy: SHARED[strategy]}
    assert_strategies_agree(model("vit-tiny"), classification_loss, images("vit"), case, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["group", "frozen"])
def test_without_running_statistics_a_resnet_pipelines(norm):
    case = {"PIPE": SHARED["PIPE"]}
    init = model("resnet-tiny", norm=norm)
    assert_strategies_agree(init, classification_loss, images("resnet-tiny"), case, steps=2)


# -- messages -------------------------------------------------------------------------------------


def norms_of(init):
    """Return the channels of each BatchNorm."""
    made = nnx.eval_shape(lambda: init(nnx.Rngs(0)))
    found = [m for _, m in nnx.iter_modules(made) if isinstance(m, BatchNorm)]
    return Counter(norm.num_features for norm in found)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full", "dots"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_one_message_forward_and_one_backward_for_each_norm(name, remat):
    """All-gathers of 8 x 2 x channels, and sums of 2 x channels; none is sent again by remat."""
    mesh, init = hfjax.make_mesh(data=8), model(name)
    layout = hfjax.layout(init, optax.sgd(0.1), mesh, hfjax.DDP)
    step = hfjax.train_step(layout, loss_of(name), remat=remat)
    found = hfjax.collectives(step.lower(images(name)).compile())
    sent, wanted = Counter(), norms_of(init)
    for entry in found:
        numbers = entry.shape
        if entry.kind == "all-gather":
            assert numbers[:2] == (8, 2)
            sent["forward", numbers[2]] += entry.count
        elif entry.kind == "all-reduce" and len(numbers) == 2 and numbers[0] == 2:
            sent["backward", numbers[1]] += entry.count
    assert sent == Counter(
        {(way, size): n for size, n in wanted.items() for way in ("forward", "backward")}
    )


@pytest.mark.slow
def test_the_norms_are_what_is_told_of_rows_that_meet():
    layout = hfjax.layout(model("resnet-tiny"), optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
    step = hfjax.train_step(layout, classification_loss)
    step.lower(images("resnet-tiny"))
    lines = str(step.batch_comms).splitlines()
    assert all("norms.py" in line and "gathered" in line for line in lines)


def test_a_mean_far_from_zero_costs_no_digits():
    """Mean 1000, deviation 1, devices with unlike means: E[x²] - E[x]² has no digit left."""
    draw = np.random.default_rng(0)
    means = 1000 + np.repeat(np.linspace(-3, 3, 8), 4)
    x = means[:, None] + draw.normal(size=(32, 4))
    norm = lambda rngs: BatchNorm(4, rngs=rngs)
    layout = hfjax.layout(norm, optax.sgd(0.0), hfjax.make_mesh(data=8), hfjax.DDP)
    step = hfjax.train_step(layout, lambda y, x: (y**3).mean())
    state, _ = step(hfjax.init(layout), x.astype(np.float32))
    made = hfjax.to_model(layout, state)
    exact = x.astype(np.float32).astype(np.float64).var(0, ddof=1)
    np.testing.assert_allclose(np.asarray(made.var[...]), 0.9 + 0.1 * exact, rtol=2e-6)
    naive = lambda x: (x**2).mean(0) - x.mean(0) ** 2
    assert (np.abs(naive(x.astype(np.float32)) / x.var(0) - 1) > 1e-3).any()


def test_gradients_through_norms_are_exact_where_devices_have_unlike_rows():
    """Against plain JAX in float64: first derivatives of what a norm hands on."""
    with jax.enable_x64(True):
        x = np.random.default_rng(1).normal(size=(16, 3, 3, 4)) * np.arange(1, 17).reshape(
            -1, 1, 1, 1
        )

        class Two(nnx.Module):
            def __init__(self, rngs):
                self.map = nnx.Param(jnp.eye(4) + 0.1)
                self.norm = BatchNorm(4, rngs=rngs)

            def __call__(self, x):
                return self.norm(x @ self.map[...])

        def loss(y, x):
            return (y**3 * jnp.cos(x)).mean()

        cases = {
            "DDP": (hfjax.DDP, {"data": 8}),
            "own": (hfjax.DDP, {"data": 4}, {"batch_view": "local"}),
        }
        assert_strategies_agree(lambda rngs: Two(rngs), loss, x, cases, steps=2)


# -- what is refused ------------------------------------------------------------------------------

WRONG: dict[str, Any] = {
    "TENSOR": (hfjax.TENSOR, {"data": 4, "tensor": 2}),
    "SEQUENCE": (hfjax.TENSOR | hfjax.SEQUENCE, {"data": 4, "tensor": 2}),
    "CONTEXT": (hfjax.CONTEXT, {"data": 4, "context": 2}),
    "GRID": (hfjax.GRID, {"data": 2, "row": 2, "tensor": 2}),
}


@pytest.mark.short(
    "resnet-tiny-TENSOR",
    "resnet-tiny-SEQUENCE",
    "resnet-tiny-GRID",
    "resnet-tiny-CONTEXT",
    "regnet-tiny-CONTEXT",
)
@pytest.mark.parametrize("strategy", WRONG)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_refuse_what_does_not_split_them(name, strategy):
    chosen, sizes = WRONG[strategy]
    with pytest.raises(ValueError, match=f"{strategy}.* Use data or fsdp"):
        hfjax.layout(model(name), optax.sgd(0.1), hfjax.make_mesh(**sizes), chosen)


@pytest.mark.parametrize("strategy", ["CONTEXT", "GRID"])
def test_a_vit_refuses_what_splits_no_images(strategy):
    chosen, sizes = WRONG[strategy]
    with pytest.raises(ValueError, match=strategy):
        hfjax.layout(model("vit-tiny"), optax.sgd(0.1), hfjax.make_mesh(**sizes), chosen)


def test_batch_norm_in_a_pipeline_is_refused_by_name():
    strategy, sizes, fields = SHARED["PIPE"]
    mesh = hfjax.make_mesh(devices=jax.devices()[:4], **sizes)
    layout = hfjax.layout(model("resnet-tiny"), optax.sgd(0.1), mesh, strategy)
    step = hfjax.train_step(layout, classification_loss, **fields)
    with pytest.raises(ValueError, match=r"BatchNorm.*norm=.group., norm=.frozen."):
        step(hfjax.init(layout, schedule=fields["schedule"]), images("resnet-tiny"))


def test_one_row_a_device_without_synchronising_is_a_warning():
    mesh = hfjax.make_mesh(data=8)
    given = model("resnet-tiny"), optax.sgd(0.1), mesh, hfjax.DDP
    layout = hfjax.layout(*given, sync_batch_norm=False)
    step, state = hfjax.train_step(layout, classification_loss), hfjax.init(layout)
    with pytest.warns(UserWarning, match="one example.*GroupNorm"):
        step.lower(images("resnet-tiny", rows=8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(state, images("resnet-tiny", rows=16))


def test_a_batch_that_devices_do_not_divide_is_refused():
    layout = hfjax.layout(model("resnet-tiny"), optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
    step = hfjax.train_step(layout, classification_loss)
    with pytest.raises(ValueError, match="12 examples"):
        step(hfjax.init(layout), images("resnet-tiny", rows=12))


@pytest.mark.slow
def test_tokens_are_no_images_and_images_no_tokens():
    from hfjax.models.gpt import GPT, GPTConfig, next_token_loss

    mesh = hfjax.make_mesh(data=8)
    layout = hfjax.layout(model("resnet-tiny"), optax.sgd(0.1), mesh, hfjax.DDP)
    step = hfjax.train_step(layout, classification_loss)
    with pytest.raises(ValueError, match=r"a model of images reads batch\['image'\]"):
        step(hfjax.init(layout), {"tokens": np.zeros((8, 9), np.int32)})
    config = GPTConfig.tiny(layers=1)
    layout = hfjax.layout(lambda rngs: GPT(config, rngs=rngs), optax.sgd(0.1), mesh, hfjax.DDP)
    step = hfjax.train_step(layout, next_token_loss)
    with pytest.raises(ValueError, match="tokens"):
        step(hfjax.init(layout), images("resnet-tiny", rows=8))


def test_run_stacked_keeps_what_layers_write():
    """As a list of the same layers does, and as a step does that runs the model as written."""
    layers: Any = stack_layers(3, lambda rngs: BatchNorm(4, rngs=rngs), nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(2, 3, (8, 4)), jnp.float32)
    y, each = run_stacked(layers, x), [BatchNorm(4, rngs=nnx.Rngs(0)) for _ in range(3)]
    for norm in each:
        x = norm(x)
    np.testing.assert_allclose(y, x, rtol=1e-6)
    wanted = np.stack([norm.mean[...] for norm in each])
    np.testing.assert_allclose(layers.mean[...], wanted, rtol=1e-6)
