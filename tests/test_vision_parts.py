"""Parts of models of images: norms, resizing, how images enter; and every setting refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hfjax.models.layers import local_ops, run_listed, run_stacked
from hfjax.models.vision.convolutions import Conv, max_pool, resize
from hfjax.models.vision.deeplab import DeepLab, DeepLabConfig
from hfjax.models.vision.image_input import normalize_images
from hfjax.models.vision.norms import BatchNorm, FrozenBatchNorm, GroupNorm
from hfjax.models.vision.regnet import RegNet, RegNetConfig
from hfjax.models.vision.resnet import ResNet, ResNetConfig
from hfjax.models.vision.vision_config import MEAN, STD, VisionConfig
from hfjax.models.vision.vit import ViT, ViTConfig

RNG = np.random.default_rng(0)
MODELS: Any = {
    "resnet": (ResNet, ResNetConfig.preset("resnet-tiny")),
    "regnet": (RegNet, RegNetConfig.preset("regnet-tiny")),
    "deeplab": (DeepLab, DeepLabConfig.preset("deeplabv3-tiny")),
    "vit": (ViT, ViTConfig.preset("vit-tiny")),
}


@pytest.mark.short("vit", "deeplab")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_three_parts_is_the_model_and_any_size_goes_through_convolutions(name):
    model, config = MODELS[name]
    made = model(config, rngs=nnx.Rngs(0))
    made.eval()
    size = (8, 8) if name == "vit" else (9, 14)
    batch: Any = {"image": RNG.integers(0, 256, (2, *size, 3)).astype(np.uint8)}
    run = run_stacked if name == "vit" else run_listed
    whole = jax.jit(made.__call__)(batch)
    parts = jax.jit(lambda batch: made.head(run(made.layers, made.embed(batch))))(batch)
    shape = (2, *size) if name == "deeplab" else (2,)
    for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        assert x.shape == (*shape, config.classes)
        np.testing.assert_array_equal(x, y)
    normalised = normalize_images(batch, config, jnp.float32)
    again = jax.jit(made.__call__)({"image": normalised})
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6), whole, again)


def test_bytes_are_normalised_by_the_mean_and_deviation_of_imagenet():
    image: Any = RNG.integers(0, 256, (2, 4, 4, 3)).astype(np.uint8)
    found = normalize_images({"image": image}, VisionConfig(), jnp.float32)
    wanted = (image / 255.0 - np.array(MEAN)) / np.array(STD)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    assert normalize_images({"image": image}, VisionConfig(), jnp.bfloat16).dtype == jnp.bfloat16


def test_without_an_auxiliary_head_there_are_no_auxiliary_logits():
    config = DeepLabConfig.preset("deeplabv3-tiny", auxiliary=False)
    made = DeepLab(config, rngs=nnx.Rngs(0))
    made.eval()
    given = {"image": jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32)}
    assert list(jax.eval_shape(made.__call__, given)) == ["out"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_variance_keeps_its_digits_far_from_zero(dtype):
    """E[x²] - E[x]² of numbers around 1000 would have none left."""
    x = (1000 + 8 * RNG.integers(-2, 3, (64, 8, 8, 2))).astype(np.float32)
    norm = BatchNorm(2, rngs=nnx.Rngs(0))
    y = norm(jnp.asarray(x, dtype))
    mean, variance = (f(x, axis=(0, 1, 2), dtype=np.float64) for f in (np.mean, np.var))
    assert y.dtype == dtype
    assert norm.mean[...].dtype == norm.var[...].dtype == jnp.float32
    np.testing.assert_allclose(norm.mean[...], 0.1 * mean, rtol=1e-6)
    n = x.size // 2
    np.testing.assert_allclose(norm.var[...], 0.9 + 0.1 * variance * n / (n - 1), rtol=1e-5)
    wanted = (x - mean) / np.sqrt(variance + 1e-5)
    np.testing.assert_allclose(y.astype(np.float32), wanted, atol=1e-2)


def test_evaluations_normalise_by_running_statistics_and_change_none():
    norm = BatchNorm(2, rngs=nnx.Rngs(0))
    norm.mean[...], norm.var[...] = jnp.array([1.0, 2.0]), jnp.array([4.0, 9.0])
    norm.eval()
    x = jnp.asarray(RNG.normal(size=(5, 2)), jnp.float32)
    wanted = (np.asarray(x) - np.array([1, 2])) / np.array([2, 3])
    np.testing.assert_allclose(norm(x), wanted, rtol=1e-4, atol=1e-5)
    assert norm.mean[...].tolist() == [1.0, 2.0]


def test_a_frozen_norm_has_no_parameters_and_stays_as_it_is_in_training():
    norm = FrozenBatchNorm(2)
    norm.scale[...] = jnp.array([2.0, 3.0])
    norm.train()
    assert not nnx.to_flat_state(nnx.state(norm, nnx.Param))
    x = jnp.asarray(RNG.normal(size=(5, 2)), jnp.float32)
    np.testing.assert_allclose(norm(x), x * jnp.array([[2.0, 3.0]]), rtol=1e-4)
    assert norm.mean[...].tolist() == [0, 0]


def test_one_number_a_channel_has_no_variance():
    norm = BatchNorm(4, rngs=nnx.Rngs(0))
    words = r"in training of \[1, 1, 1, 4\]: one number a channel.*Give more rows .*norm=\"group\""
    with pytest.raises(ValueError, match=words):
        norm(jnp.zeros((1, 1, 1, 4)))
    with pytest.raises(ValueError, match=r"mask=…\): all rows and positions count. Leave"):
        norm(jnp.zeros((2, 4)), mask=jnp.ones((2, 4), bool))
    norm.eval()
    assert norm(jnp.zeros((1, 1, 1, 4))).shape == (1, 1, 1, 4)


def test_groups_are_normalised_within_a_row():
    x = jnp.asarray(RNG.normal(size=(3, 4, 5, 6)), jnp.float32)
    y = np.asarray(GroupNorm(6, 2)(x)).reshape(3, 20, 2, 3)
    np.testing.assert_allclose(y.mean((1, 3)), 0, atol=1e-6)
    np.testing.assert_allclose(y.std((1, 3)), 1, rtol=1e-4)
    np.testing.assert_array_equal(GroupNorm(6, 2)(x[1:2])[0], np.asarray(GroupNorm(6, 2)(x))[1])


def test_moments_are_of_all_but_the_last_dimension():
    x = jnp.asarray(RNG.normal(size=(3, 4, 5, 6)), jnp.bfloat16)
    mean, variance, count = local_ops.channel_stats(x)
    assert count == 60
    wide = np.asarray(x, np.float64).reshape(-1, 6)
    np.testing.assert_allclose(mean, wide.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(variance, wide.var(0), rtol=1e-5)
    assert mean.dtype == variance.dtype == jnp.float32


@pytest.mark.parametrize("new", [(3, 4), (5, 7), (9, 13), (1, 1), (11, 2)])
def test_resized_pixels_are_between_their_neighbours(new):
    """As torch's interpolate computes them: the place of a pixel's middle, within the image."""
    x = RNG.normal(size=(2, 5, 7, 3))
    wanted = x
    for axis, count in ((1, new[0]), (2, new[1])):
        old = wanted.shape[axis]
        at = np.maximum((np.arange(count) + 0.5) * old / count - 0.5, 0)
        left = np.floor(at).astype(int)
        right = np.minimum(left + 1, old - 1)
        part = np.expand_dims(at - left, tuple(i for i in range(4) if i != axis))
        wanted = wanted.take(left, axis) * (1 - part) + wanted.take(right, axis) * part
    with jax.enable_x64(True):
        np.testing.assert_allclose(resize(jnp.asarray(x), new), wanted, rtol=1e-12, atol=1e-12)


def test_a_pool_takes_nothing_from_beyond_the_edge_and_keeps_the_type():
    x = jnp.asarray(RNG.normal(size=(1, 5, 6, 2)) - 10, jnp.bfloat16)
    padded = np.pad(
        np.asarray(x, np.float32), ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-99
    )
    wanted = [[padded[0, i : i + 3, j : j + 3].max((0, 1)) for j in (0, 2, 4)] for i in (0, 2, 4)]
    np.testing.assert_array_equal(np.asarray(max_pool(x), np.float32)[0], wanted)
    assert max_pool(x).dtype == jnp.bfloat16


def test_groups_dilation_and_stride_take_the_positions_that_torch_takes():
    conv: Any = Conv((3, 3, 2, 6), stride=2, dilation=2, bias=True, rngs=nnx.Rngs(0))
    x = RNG.normal(size=(1, 7, 8, 4)).astype(np.float32)
    kernel, bias = np.asarray(conv.kernel[...]), np.asarray(conv.bias[...])
    padded = np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)))[0]
    found = np.asarray(conv(jnp.asarray(x)))[0]
    assert found.shape == (4, 4, 6)
    for i, j in ((0, 0), (1, 2), (3, 3)):
        seen = padded[2 * i : 2 * i + 5 : 2, 2 * j : 2 * j + 5 : 2]
        each = [
            np.tensordot(seen[..., 2 * g : 2 * g + 2], kernel[..., 3 * g : 3 * g + 3], 3)
            for g in (0, 1)
        ]
        np.testing.assert_allclose(found[i, j], np.concatenate(each) + bias, rtol=1e-4, atol=1e-5)


# -- what begins as torchvision's begins ----------------------------------------------------------


@pytest.mark.slow
def test_models_begin_as_torchvisions_begin():
    model: Any = ResNet(ResNetConfig.preset("resnet-tiny", widths=(64, 128)), rngs=nnx.Rngs(0))
    std = lambda x: float(np.std(np.asarray(x[...])))
    assert np.isclose(std(model.layers[1].conv2.kernel), (2 / (9 * 128)) ** 0.5, rtol=0.02)
    fc = np.asarray(model.fc.kernel[...])
    assert 0.95 < np.abs(fc).max() * 128**0.5 <= 1
    assert 0.2 < np.abs(np.asarray(model.fc.bias[...])).max() * 128**0.5 <= 1
    regnet = RegNet(RegNetConfig.preset("regnet-tiny"), rngs=nnx.Rngs(0))
    assert np.isclose(std(regnet.fc.kernel), 0.01, rtol=0.2)
    vit: Any = ViT(ViTConfig.preset("vit-tiny", embed=128, mlp=256), rngs=nnx.Rngs(0))
    qkv = np.abs(np.asarray(vit.layers.attention.qkv.kernel[...])).max()
    assert 0.98 < qkv / (6 / (4 * 128)) ** 0.5 <= 1
    assert 0.98 < np.abs(np.asarray(vit.layers.attention.out.kernel[...])).max() * 128**0.5 <= 1
    assert 0.98 < np.abs(np.asarray(vit.layers.mlp.up.kernel[...])).max() / (6 / 384) ** 0.5 <= 1
    assert 0 < std(vit.layers.mlp.down.bias) < 2e-6
    assert np.isclose(std(vit.positions), 0.02, rtol=0.1)
    assert std(vit.fc.kernel) == std(vit.token) == 0
    deeplab = DeepLab(DeepLabConfig.preset("deeplabv3-tiny"), rngs=nnx.Rngs(0))
    around = np.abs(np.asarray(deeplab.pyramid.around[0].conv.kernel[...])).max()
    assert 0.98 < around * (9 * 64) ** 0.5 <= 1


# -- what is refused ------------------------------------------------------------------------------

R, N, D, V = ResNetConfig, RegNetConfig, DeepLabConfig, ViTConfig
REFUSED: Any = [
    (R, {"classes": 0}, "ResNetConfig: classes=0; a whole number, at least 1, is expected"),
    (V, {"classes": 2.5}, "ViTConfig: classes=2.5; a whole number"),
    (R, {"mean": (1.0, 2.0)}, r"mean=\(1.0, 2.0\); three finite numbers are expected, of red"),
    (
        D,
        {"std": (0.1, 0.1, 0.0)},
        r"std=.*; three finite numbers above 0 are.*ImageNet are \(0.229",
    ),
    (R, {"norm": "layer"}, "norm='layer'; one of batch, group, frozen"),
    (R, {"norm": "group", "norm_groups": 48}, "64 channels do not divide into norm_groups=48. Ch"),
    (N, {"norm": "group"}, "48 channels do not divide into norm_groups=32"),
    (D, {"norm": "group", "pyramid": 40}, "40 channels do not divide into norm_groups=32"),
    (R, {"norm_groups": 0}, "norm_groups=0; a whole number"),
    (R, {"block": "wide"}, "block='wide'; one of basic, bottleneck"),
    (R, {"stem": "none"}, "stem='none'; one of imagenet, small"),
    (R, {"depths": (3, 0)}, r"depths=\(3, 0\); a tuple of whole numbers, at least 1 each, is"),
    (R, {"widths": (8, 8)}, r"widths=\(8, 8\); a tuple of 4 whole numbers"),
    (R, {"output_stride": 12}, 'output_stride=12; one of 4, 8, 16, 32 with stem="imagenet" and 4'),
    (
        R,
        {"output_stride": 8, "block": "basic"},
        "output_stride=8 dilates blocks, and basic .*bottle",
    ),
    (D, {"rates": ()}, r"rates=\(\); a tuple of whole numbers"),
    (D, {"pyramid": -1}, "pyramid=-1; a whole number"),
    (D, {"dropout": 2}, "dropout=2; the part that is dropped is from 0 to 1"),
    (D, {"auxiliary_dropout": "no"}, "auxiliary_dropout='no'; the part"),
    (D, {"auxiliary": 1}, "auxiliary=1; true or false"),
    (
        D,
        {"depths": (2,), "widths": (8,), "output_stride": None},
        r"auxiliary=True with depths=\(2,\); .*Give two stages or more, or auxiliary=False",
    ),
    (N, {"first": 20}, "first=20; a multiple of 8 is expected, as all"),
    (N, {"step": 1.0}, "step=1.0; a number above 1 is expected"),
    (N, {"slope": -1}, "slope=-1; a number at least 0"),
    (N, {"squeeze": 0}, "squeeze=0; a number above 0"),
    (N, {"group": 0}, "group=0; a whole number"),
    (V, {"patch": 15}, "image=224 does not divide by patch=15. Choose a patch that divides the im"),
    (V, {"heads": 5}, "embed=768 does not divide by heads=5. Choose heads that divide embed"),
    (V, {"dropout": -0.1}, "dropout=-0.1; the part"),
]


@pytest.mark.parametrize(("kind", "given", "match"), REFUSED, ids=lambda x: str(x)[:24])
def test_a_shape_that_makes_no_model_is_refused(kind, given, match):
    with pytest.raises(ValueError, match=match):
        kind(**given)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            R,
            "ResNet preset 'huge': one of resnet-tiny, resnet18, resnet34, resnet50, resnet101",
        ),
        (N, "RegNet preset 'huge': one of regnet-tiny, regnet-y-400mf, .*, regnet-y-128gf"),
        (
            D,
            "DeepLab preset 'huge': one of deeplabv3-tiny, deeplabv3-resnet50, deeplabv3-resnet1",
        ),
        (V, "ViT preset 'huge': one of vit-tiny, vit-b-16, vit-l-16"),
    ],
)
def test_a_preset_that_is_unknown_is_refused_with_those_there_are(kind, words):
    with pytest.raises(ValueError, match=words):
        kind.preset("huge")


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ({"tokens": jnp.zeros(3)}, r"a batch of tokens: .* reads batch\['image'\]"),
        (
            {"image": jnp.zeros((2, 3, 8, 8))},
            r"\[2, 3, 8, 8\]: \[rows, height, width, 3\] .*Transp",
        ),
        ({"image": jnp.zeros((8, 8, 3))}, r"images of shape \[8, 8, 3\]"),
        (
            {"image": jnp.zeros((1, 8, 8, 3), int)},
            "images of int32: uint8 is expected .*normalised al",
        ),
    ],
)
@pytest.mark.parametrize("name", ["vit", "deeplab"])
def test_what_are_no_images_is_refused(name, batch, match):
    model, config = MODELS[name]
    with pytest.raises(ValueError, match=match):
        model(config, rngs=nnx.Rngs(0)).embed(batch)


def test_images_of_another_size_are_refused_by_what_has_a_position_for_each_patch():
    model = ViT(ViTConfig.preset("vit-tiny"), rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match="of 8x10 pixels, the model is made for 8x8: resize them, or"
    ):
        model.embed({"image": jnp.zeros((1, 8, 10, 3))})
