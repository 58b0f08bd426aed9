"""`hfjax train`, `eval`, `export`: from a folder of images to a score, and back to torchvision."""

import json
import shutil
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
import yaml
from PIL import Image

import hfjax
from hfjax.cli.model_files import export_command
from hfjax.cli.train import evaluate_command
from hfjax.models.vision.preset_table import PRESETS
from hfjax.trainer import RunComponents, train
from hfjax.trainer.config import (
    DataConfig,
    EvalConfig,
    LogConfig,
    LRScheduleConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from hfjax.trainer.config_io import load, save, setting_changes, to_plain
from hfjax.trainer.optimizer import sgd
from hfjax.trainer.tasks.images import intersection_over_union
from hfjax.utils.renamed import CONFIG_KEYS
from hfjax.weights.tensor_files import read_header, read_rows
from hfjax.weights.vision_files import read_vision

pytestmark = pytest.mark.usefixtures("shown_log")

COLOURS = {"blue": (20, 20, 160), "green": (20, 160, 20), "red": (160, 20, 20)}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three classes; 11 images each to validate on, which no batch divides."""
    place, draw = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for part, count in (("train", 16), ("valid", 11)):
        for name, colour in COLOURS.items():
            folder = place / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 60, (20, 24, 3)) + np.array(colour).reshape(1, 1, 3)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    return place


@pytest.fixture(scope="module")
def street(tmp_path_factory):
    place, draw = tmp_path_factory.mktemp("street"), np.random.default_rng(0)
    for part, count in (("train", 8), ("valid", 5)):
        for folder in ("images", "masks"):
            (place / part / folder).mkdir(parents=True)
        for i in range(count):
            pixels, mask = draw.integers(0, 80, (16, 20, 3)), np.zeros((16, 20), np.uint8)
            pixels[4:12, 5:15] += 150
            mask[4:12, 5:15], mask[0] = 1, 255
            Image.fromarray(pixels.astype(np.uint8)).save(place / part / "images" / f"{i}.png")
            Image.fromarray(mask).save(place / part / "masks" / f"{i}.png")
    return place


def of_photos(photos, out, **changes) -> TrainConfig:
    fields = {"steps": 4, "global_batch_size": 8, "mesh": MeshConfig(data=2), "devices": 2}
    fields |= changes
    model, data = fields.pop("model", {}), fields.pop("data", {})
    return TrainConfig(
        run_dir=out,
        model=ModelConfig(**({"preset": "resnet-tiny"} | model)),
        data=DataConfig(train=(str(photos),), **({"image_size": 16} | data)),
        eval=EvalConfig(interval=2),
        log=LogConfig(interval=2),
        **fields,
    )


def lines_of(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_from_a_folder_to_scores(photos, tmp_path, capsys):
    train(of_photos(photos, tmp_path / "run", optimizer=OptimizerConfig(name="sgd", momentum=0.9)))
    told = capsys.readouterr().out
    assert "48 images of 3 classes; 16 x 16 pixels" in told
    assert "normalised by mean 0.485 0.456 0.406, deviation 0.229 0.224 0.225" in told
    assert "images/s/device" in told
    journal = lines_of(tmp_path / "run")
    assert {"waiting_for_data", "images_per_second", "top1"} <= {
        k for line in journal for k in line
    }
    assert evaluate_command([str(tmp_path / "run"), "--devices", "4"]) == 0
    found = capsys.readouterr().out
    assert "top-1" in found
    assert "33 images" in found
    valid = [line["valid_top1"] for line in journal if "valid_top1" in line]
    assert f"top-1 {valid[-1]:.2%}" in found
    for name in ("blue", "red"):
        shutil.copytree(photos / "valid" / name, tmp_path / "some" / name)
    some = [str(tmp_path / "run"), "--devices", "4", "--data", str(tmp_path / "some")]
    assert evaluate_command(some) == 0
    found = capsys.readouterr().out
    assert "22 images" in found
    assert "some has images of 2 of the 3 classes; of these it has none, and the scores" in found
    assert found.rstrip().endswith(": green")
    (tmp_path / "some" / "blue").rename(tmp_path / "some" / "white")
    with pytest.raises(SystemExit):
        evaluate_command(some)
    assert "only the second has white" in capsys.readouterr().err


@pytest.mark.slow
def test_scores_are_those_of_a_plain_loop_over_all_images(photos, tmp_path):
    """The last batch is filled up: rows that do not count."""
    parts = RunComponents(of_photos(photos, tmp_path))
    state = hfjax.init(parts.layout)
    module = hfjax.to_model(parts.layout, state)
    module.eval()
    right, losses, valid = 0, [], parts.valid
    assert valid is not None
    for batch in valid.rewind():
        logits = np.asarray(module(batch), np.float64)
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for row, label, counts in zip(logp, batch["label"], batch["mask"], strict=True):
            if counts:
                right, losses = right + (row.argmax() == label), [*losses, -row[label]]
    found: Any = parts.validated(state)
    assert found.count == len(losses) == 33
    assert found.numbers["valid_top1"] == pytest.approx(right / 33)
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_as_if_it_was_not(photos, tmp_path):
    alike = {"lr_schedule": LRScheduleConfig(type="constant", warmup_steps=0)}
    train(of_photos(photos, tmp_path / "whole", steps=8, **alike))
    train(of_photos(photos, tmp_path / "parts", steps=3, **alike))
    assert train(of_photos(photos, tmp_path / "parts", steps=8, **alike)).step == 8
    losses = lambda out: [line["loss"] for line in lines_of(out) if "loss" in line]
    assert len(losses(tmp_path / "whole")) == 8
    np.testing.assert_allclose(losses(tmp_path / "parts"), losses(tmp_path / "whole"), rtol=1e-6)


@pytest.mark.slow
def test_iou_of_each_class(street, tmp_path):
    fields = {"model": {"preset": "deeplabv3-tiny"}, "global_batch_size": 4}
    parts = RunComponents(of_photos(street, tmp_path, **fields))
    state = hfjax.init(parts.layout)
    module = hfjax.to_model(parts.layout, state)
    module.eval()
    counts, valid, run = np.zeros((2, 2), np.int64), parts.valid, jax.jit(module.__call__)
    assert valid is not None
    for batch in valid.rewind():
        seen = np.asarray(run(batch)["out"]).argmax(-1)
        for truth, guess, here in zip(batch["label"], seen, batch["mask"], strict=True):
            kept = (truth != 255) & bool(here)
            np.add.at(counts, (truth[kept], guess[kept]), 1)
    found: Any = parts.validated(state)
    assert list(found.iou.values()) == intersection_over_union(counts)


@pytest.mark.slow
def test_iou_of_each_class_is_shown(street, tmp_path, capsys):
    fields = {"model": {"preset": "deeplabv3-tiny"}, "global_batch_size": 4}
    train(of_photos(street, tmp_path / "run", **fields))
    capsys.readouterr()
    assert evaluate_command([str(tmp_path / "run"), "--devices", "1"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "IoU" in told[-3]
    assert [line.split()[0] for line in told[-2:]] == ["0", "1"]


def test_a_dropout_of_0_is_none_and_that_of_the_auxiliary_head_is_set(street, tmp_path):
    def rates(**model):
        parts = RunComponents(
            of_photos(street, tmp_path, model={"preset": "deeplabv3-tiny", **model})
        )
        return parts.model.shape.dropout, parts.model.shape.auxiliary_dropout

    assert rates() == (0.5, 0.1)
    assert rates(dropout=0.0) == (0.0, 0.1)
    assert rates(dropout=0.25, auxiliary_dropout=0.0) == (0.25, 0.0)
    with pytest.raises(ValueError, match=r"--model.auxiliary-dropout 2: a fraction from 0 to 1"):
        ModelConfig(auxiliary_dropout=2)


def test_a_dropout_of_0_in_the_file_of_an_older_run_is_that_of_its_preset(tmp_path):
    model = {"preset": "deeplabv3-tiny", "dropout": 0.0}
    config = of_photos(tmp_path / "photos", tmp_path, model=model)
    save(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml").model.dropout == 0.0
    recorded = in_old_fields(config)
    del recorded["model"]["auxiliary_dropout"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recorded))
    with pytest.warns(UserWarning, match="fields of an earlier hfjax"):
        found = load(tmp_path / "config.yaml")
    assert found == replace(config, model=replace(config.model, dropout=None))
    assert setting_changes(found, recorded) == []
    assert setting_changes(found, in_old_fields(config)) != []


def in_old_fields(config) -> dict[str, Any]:
    """Return a configuration with the fields that it had before."""
    old, found = {new: old for old, new in CONFIG_KEYS.items()}, {}
    plain = to_plain(config)
    flat = {
        f"{box}.{x}": y for box, of in plain.items() if isinstance(of, dict) for x, y in of.items()
    }
    flat |= {name: x for name, x in plain.items() if not isinstance(x, dict)}
    for new in ("zero", "sequence_parallel", "offload.optimizer", "offload.parameters"):
        del flat[new]
    for name, value in ({**flat, "strategy": "ddp"}).items():
        *box, last = old.get(name, name).split(".")
        (found.setdefault(box[0], {}) if box else found)[last] = value
    return found


def test_weights_in_and_out_and_a_new_head(photos, tmp_path, capsys):
    first, file = tmp_path / "first", tmp_path / "net.safetensors"
    train(of_photos(photos, first, steps=2))
    assert export_command([str(first), "--export-dir", str(file), "--devices", "2"]) == 0
    shape = replace(PRESETS["resnet-tiny"], classes=3)
    counters = [x for name, x in read_header(file).items() if name.endswith(".num_batches_tracked")]
    assert counters
    assert {read_rows(x, 0, 1).item() for x in counters} == {2}  # the steps of the run
    assert all(x is not None for x in read_vision(file, shape).values())
    more = {"preset": "resnet-tiny", "weights": file, "num_classes": 5}
    with pytest.raises(ValueError, match=r"(?s)other classes.*--model.new-head"):
        train(of_photos(photos, tmp_path / "five", model=more, steps=1))
    frozen = more | {"new_head": True, "freeze_batch_norm": True}
    result = train(of_photos(photos, tmp_path / "six", model=frozen, steps=2))
    assert "drawn anew: fc/bias, fc/kernel" in capsys.readouterr().out
    given = np.asarray(read_vision(file, shape)["stem/norm/mean"])
    np.testing.assert_array_equal(result.state.variables["stem"]["norm"]["mean"], given)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        export_command([str(first), "--export-dir", str(tmp_path / "folder"), "--devices", "2"])
    assert "a name that ends in .safetensors" in capsys.readouterr().err


WRONG = {
    "masks for classes": (
        {"model": {"preset": "deeplabv3-tiny"}},
        "folders of classes, and .*what each pixel shows",
    ),
    "fewer classes": (
        {"model": {"preset": "resnet-tiny", "num_classes": 2}},
        "--model.num-classes 2: .* has 3 classes. Give 3",
    ),
    "text": ({"model": {"preset": "resnet-tiny", "seq_len": 8}}, "--model.seq-len 8: .* of images"),
    "experts": (
        {"model": {"preset": "resnet-tiny", "capacity_factor": 2.0}},
        "--model.capacity-factor 2.0: .* of images",
    ),
    "packing": ({"data": {"packing": "documents"}}, "--data.packing .documents.: .* of images"),
    "two norms": (
        {"model": {"preset": "resnet-tiny", "freeze_batch_norm": True, "group_norm": True}},
        "one of the two",
    ),
    "dropout of a ResNet": ({"model": {"preset": "resnet-tiny", "dropout": 0.1}}, "has no dropout"),
    "an auxiliary head of a ViT": (
        {"model": {"preset": "vit-tiny", "auxiliary_dropout": 0.1}},
        "--model.auxiliary-dropout 0.1: vit-tiny has no auxiliary dropout. Leave it out",
    ),
    "dropout of one's own": (
        {"model": {"factory": "a.py:b", "dropout": 0.0}},
        "--model.dropout is of presets, and --model.factory a.py:b is none",
    ),
    "no norms": ({"model": {"preset": "vit-tiny", "group_norm": True}}, "has no BatchNorm"),
    "a head alone": ({"model": {"preset": "resnet-tiny", "new_head": True}}, "--model.weights"),
    "frozen, of nothing": (
        {"model": {"preset": "resnet-tiny", "freeze_batch_norm": True}},
        "add --model",
    ),
    "smooth masks": (
        {"model": {"preset": "resnet-tiny", "label_smoothing": 0.1, "loss": "a.py:b"}},
        "say it there",
    ),
    "more than all": (
        {"data": {"crop_scale": (0.5, 2.0)}},
        "--data.crop-scale 0.5 2.0: of classes it is the part of the area",
    ),
    "a patch": (
        {"model": {"preset": "vit-tiny"}, "data": {"image_size": 9}},
        "does not divide by patch=2",
    ),
    "a misspelt preset": (
        {"model": {"preset": "resnet5"}},
        r"--model.preset resnet5: one of gpt-tiny.*, vit-l-16\. Did you mean resnet50\?",
    ),
    "a preset of text": (
        {"model": {"preset": "gpt-tiny"}, "data": {"image_size": None}},
        "--data.train .* holds images, and gpt-tiny is a model of text. Give --model.preset, one o",
    ),
    "images for text": (
        {"model": {"preset": "gpt-tiny"}, "data": {}},
        "--data.image-size 16: .*images",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings_are_told_by_their_flags(photos, tmp_path, name):
    changes, words = WRONG[name]
    made = lambda parts: (parts.layout, parts.data)
    with pytest.raises(ValueError, match=words):
        made(RunComponents(of_photos(photos, tmp_path / "run", **changes)))


def test_no_data_is_told(tmp_path):
    config = TrainConfig(run_dir=tmp_path, model=ModelConfig(preset="resnet-tiny"))
    with pytest.raises(ValueError, match="trained on one folder"):
        _ = RunComponents(config).data


def test_a_pickle_is_never_opened(photos, tmp_path):
    model = {"preset": "resnet-tiny", "weights": tmp_path / "net.pth"}
    with pytest.raises(ValueError, match=r"never opened.*safetensors\.torch\.save_file"):
        train(of_photos(photos, tmp_path / "run", model=model))


def test_sgd_decays_before_the_momentum_as_torch_does():
    """By hand: buf = m * buf + g + wd * p; p -= rate * buf."""
    made = sgd(lambda step: 0.1, momentum=0.9, weight_decay=0.01)
    p, buffer = np.array([1.0, -2.0]), np.zeros(2)
    mine: Any = jax.numpy.asarray(p)
    state = made.init(mine)
    for step in range(3):
        g = np.array([0.5, step])
        buffer = 0.9 * buffer + g + 0.01 * p
        p = p - 0.1 * buffer
        updates, state = made.update(jax.numpy.asarray(g), state, mine)
        mine = optax.apply_updates(mine, updates)
    np.testing.assert_allclose(mine, p, rtol=1e-6)


def test_an_image_that_does_not_decode_counts_in_no_score(photos, tmp_path, capsys):
    place = tmp_path / "photos"
    shutil.copytree(photos, place)
    for part, number in (("train", 3), ("valid", 0)):
        (place / part / "red" / f"{number}.png").write_text("none")
    with pytest.raises(ValueError, match=r"red/3.png"):
        list(RunComponents(of_photos(place, tmp_path, data={"epochs": 1})).data)
    out, skip = tmp_path / "run", {"on_broken_image": "skip", "epochs": 1}
    train(of_photos(place, out, data=skip, steps=20))
    told = capsys.readouterr().out
    assert "train: 1 images did not decode, and others took their places: red/3.png" in told
    assert "valid: 1 images did not decode, and they do not count: red/0.png" in told
    assert evaluate_command([str(out), "--devices", "2"]) == 0
    told = capsys.readouterr().out
    assert "32 images" in told
    assert "red/0.png" in told
