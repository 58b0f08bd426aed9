"""Weights of torchvision's models come in by their names, and go out bit for bit."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import hfjax
from hfjax.models.vision import deeplab, regnet, resnet, vit
from hfjax.models.vision.resnet import ResNetConfig
from hfjax.models.vision.vision_config import VisionConfig
from hfjax.utils.paths import flatten
from hfjax.weights.tensor_files import read_header, read_rows
from hfjax.weights.vision_files import read_vision, with_weights, write_vision
from hfjax.weights.vision_rules import COUNTER, array_shapes, model_factory, vision_table
from tests.model_folders import write_file
from tests.test_vision_models import CONFIGS
from tests.vision_draws import drawn, of

PRESETS = {**resnet.PRESETS, **regnet.PRESETS, **deeplab.PRESETS, **vit.PRESETS}
ENTRIES = {"resnet101": 626, "deeplabv3-resnet101": 676, "vit-b-16": 152, "regnet-y-400mf": 384}
TINY = ResNetConfig.preset("resnet-tiny")
SPLIT = hfjax.FSDP.edit(replicate_below=0)


@pytest.mark.short("deeplabv3-tiny")
@pytest.mark.parametrize("name", PRESETS)
def test_each_tensor_of_a_file_has_one_place_and_each_place_a_tensor(name):
    table = vision_table(PRESETS[name])
    pieces = list(table.expand())
    places = [(piece.path, piece.index) for piece in pieces]
    assert len({p.name for p in pieces}) == len(set(places)) == len(places)
    elements = lambda shapes: sum(int(np.prod(shape)) for shape in shapes)
    shapes = array_shapes(PRESETS[name])
    assert {path for path, _ in places} == set(shapes)
    assert elements(p.rule.shape for p in pieces) == elements(shapes.values())
    counters = sum(p.name.endswith("running_var") for p in pieces)
    assert len(pieces) + counters == ENTRIES.get(name, len(pieces) + counters)


def file_of(path, config, dtype: Any = np.float32, **others):
    """Write a file of a model, with what torch counts, in the order of a table."""
    tensors = {}
    for piece in vision_table(config).expand():
        tensors[piece.name] = drawn(piece.name, piece.rule.shape).astype(dtype)
        if piece.name.endswith("running_var"):
            name = piece.name.replace("running_var", COUNTER)
            tensors[name] = np.array(of(name).integers(1, 1 << 40), np.int64)
    write_file(path, {**tensors, **others})
    return path


def layout_of(config, strategy=hfjax.DDP, **sizes) -> hfjax.Layout:
    devices = jax.devices()[: int(np.prod(list(sizes.values()) or [1]))]
    mesh = hfjax.make_mesh(devices=devices, **sizes)
    return hfjax.layout(model_factory(config), optax.adam(1e-3), mesh, strategy)


@pytest.mark.short("float32-basic", "bfloat16-vit")
@pytest.mark.parametrize("case", ["basic", "frozen", "group", "regnet", "deeplab", "vit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_comes_out_of_split_devices_bit_for_bit(case, dtype, tmp_path):
    config, dtype = CONFIGS[case], {"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype)
    file = file_of(tmp_path / "a.safetensors", config, dtype)
    layout = layout_of(config, SPLIT, fsdp=4)
    state = with_weights(layout, read_vision(file, config))
    write_vision(tmp_path / "b.safetensors", layout, state, config, like=file)
    assert (tmp_path / "b.safetensors").read_bytes() == file.read_bytes()


def test_a_pipeline_takes_a_frozen_model_and_gives_it_back(tmp_path):
    config, schedule = CONFIGS["frozen"], hfjax.Schedule("1f1b", 2)
    file = file_of(tmp_path / "a.safetensors", config)
    layout = layout_of(config, hfjax.PIPE, pipe=2)
    state = with_weights(layout, read_vision(file, config), schedule=schedule)
    write_vision(tmp_path / "b.safetensors", layout, state, config, like=file)
    assert (tmp_path / "b.safetensors").read_bytes() == file.read_bytes()


def test_batches_are_counted_on(tmp_path):
    config = ResNetConfig.preset("resnet-tiny")
    file = file_of(tmp_path / "a.safetensors", config)
    layout = layout_of(config)
    state = replace(with_weights(layout, read_vision(file, config)), step=jnp.int32(3))

    def counted(config, like):
        out = tmp_path / "b.safetensors"
        write_vision(out, layout, state, config, like=like)
        found = {k: t for k, t in read_header(out).items() if k.endswith(COUNTER)}
        return {name: read_rows(t, 0, 1).item() for name, t in found.items()}

    before = {
        name: read_rows(t, 0, 1).item()
        for name, t in read_header(file).items()
        if name.endswith(COUNTER)
    }
    assert counted(config, None) == dict.fromkeys(before, 3)
    assert counted(config, file) == {name: n + 3 for name, n in before.items()}
    assert counted(replace(config, norm="frozen"), file) == before


@pytest.mark.parametrize("case", ["basic", "vit"])
def test_a_part_of_an_array_is_that_part(case, tmp_path):
    config = CONFIGS[case]
    weights = read_vision(file_of(tmp_path / "a.safetensors", config), config)
    for path, x in weights.items():
        assert x is not None
        whole = np.asarray(x)
        assert (whole.shape, whole.dtype) == (array_shapes(config)[path], x.dtype)
        part = tuple(slice(n // 2, n) for n in whole.shape)
        np.testing.assert_array_equal(x[part], whole[part])
        np.testing.assert_array_equal(x[whole.shape[0] - 1], whole[-1])


def test_a_file_that_was_replaced_after_its_header_was_read_is_not_read(tmp_path):
    weights = read_vision(file := file_of(tmp_path / "a.safetensors", TINY), TINY)
    tensor = read_header(file)["fc.weight"]
    file_of(file, TINY, np.float64)
    for read in (lambda: np.asarray(weights["fc/kernel"]), lambda: read_rows(tensor, 0, 1)):
        with pytest.raises(
            ValueError, match=r"a\.safetensors was written or replaced after its he"
        ):
            read()


@pytest.mark.slow
def test_a_new_head_keeps_the_rest(tmp_path):
    file = file_of(tmp_path / "a.safetensors", replace(config := TINY, classes=7))
    layout = layout_of(config)
    state = with_weights(layout, read_vision(file, config, new_head=True), seed=5)
    found, drawn = flatten(state.params), flatten(hfjax.init(layout, seed=5).params)
    same = {path for path, x in found.items() if np.array_equal(x, drawn[path])}
    assert same == {"fc/kernel", "fc/bias"}


@pytest.mark.slow
def test_what_segments_may_begin_with_a_resnet_that_classifies(tmp_path):
    config = CONFIGS["deeplab"]
    alone = ResNetConfig(widths=config.widths, depths=config.depths, classes=3)
    file = file_of(tmp_path / "a.safetensors", alone)
    layout = layout_of(config)
    state = with_weights(layout, read_vision(file, config, new_head=True))
    found = {**flatten(state.params), **flatten(state.variables)}
    for path, x in read_vision(file, alone).items():
        if not path.startswith("fc/"):
            np.testing.assert_array_equal(found[path], np.asarray(x))
    with pytest.raises(ValueError, match=r"of a ResNet alone, .* the rest anew: --model.new-head"):
        read_vision(file, config)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"depths": (2, 1)}, r"(?s)layer1.1.conv1.weight \[16, 16, 3, 3\] .*is missing.*Nothing"),
        ({"depths": (1,), "widths": (16,)}, r"(?s)layer2.0.conv1.weight.* is no tensor of this mo"),
        ({"block": "bottleneck"}, r"(?s)layer1.0.bn3.bias .*missing.*float32\[16, 16, 3, 3\], \["),
        (
            {"classes": 7},
            r"(?s)other classes.*fc.weight.*\[7, 32\].*--model.new-head .*number of cl",
        ),
    ],
    ids=lambda x: str(x)[:20],
)
def test_weights_of_another_shape_are_refused_with_names(change, match, tmp_path):
    file = file_of(tmp_path / "a.safetensors", TINY)
    with pytest.raises(ValueError, match=match):
        read_vision(file, replace(TINY, **change))


def test_weights_of_another_depth_have_no_new_head_either(tmp_path):
    file = file_of(tmp_path / "a.safetensors", TINY)
    with pytest.raises(ValueError, match="is missing"):
        read_vision(file, replace(TINY, depths=(1, 2)), new_head=True)


@pytest.mark.parametrize("name", ["model.pth", "model.pt", "model.bin", "model.ckpt"])
def test_a_pickle_is_never_opened(name, tmp_path):
    words = rf"is a pickle, .*never opened.*save_file\(torch.load\('{name}', .*'model.safetensors'"
    with pytest.raises(ValueError, match=words):
        read_vision(tmp_path / name, TINY)  # which is not even there


def test_what_is_no_file_of_safetensors_is_refused(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ValueError, match="is no whole file of safetensors"):
        read_vision(tmp_path / "a.safetensors", TINY)


def test_what_is_no_configuration_of_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="one of ResNetConfig, RegNetConfig, DeepLabConfig, ViTC"):
        vision_table(VisionConfig())


def test_statistics_of_a_model_that_has_none_are_refused(tmp_path):
    weights = read_vision(file_of(tmp_path / "a.safetensors", TINY), TINY)
    with pytest.raises(ValueError, match=r"norm1?/mean is neither .*another shape or norm"):
        with_weights(layout_of(replace(TINY, norm="group")), weights)
