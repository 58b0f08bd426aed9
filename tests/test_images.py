"""Images as rows: the same on any processes, threads and restarts, and as Pillow makes them."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from hfjax.data import share
from hfjax.data.images import Augment, ImageLoader, ImageSet, parts_of
from hfjax.data.images.augment import central_crop, color_factors, generator, random_crop
from hfjax.data.images.decode import read_image, read_mask
from hfjax.data.images.pixels import FILL, adjust_colors, resize_and_crop, resize_labels
from hfjax.data.images.report import examine, format_report
from tests.small_images import CLASSES, photos, png, smooth, street, tiff

ALL = Augment(flip=0.5, brightness=0.4, contrast=0.4, saturation=0.4)
KINDS = pytest.mark.parametrize("kind", ["classes", "masks"])


@pytest.fixture(name="folder")
def fixture_folder(tmp_path):
    return {"classes": photos(tmp_path / "photos"), "masks": street(tmp_path / "street")}


def loader(folder, batch_size=4, size=16, **more) -> ImageLoader:
    return ImageLoader(folder, batch_size, size, **{"augment": ALL, "seed": 3, **more})


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all((one[k] == other[k]).all() for k in one)


def joined(batches) -> dict:
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


# -- a function of seed, epoch and row ----------------------------------------------------


@KINDS
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_together_give_the_same_pixels_for_two_epochs(folder, kind, processes):
    options = {"batch_size": 4, "epochs": 2, "pad_last": True}
    whole = loader(folder[kind], **options)
    assert whole.examples_per_epoch % 4, "the epochs must be uneven for this to say something"
    parts = [
        loader(folder[kind], local_examples=share(4, p, processes), **options)
        for p in range(processes)
    ]
    assert all(same(b, joined(each)) for b, *each in zip(whole, *parts, strict=True))


@KINDS
def test_threads_batches_and_a_batch_at_random_change_no_pixel(folder, kind):
    alone = loader(folder[kind], batch_size=1, epochs=2, threads=0)
    stream = joined(list(alone))
    for threads, rows in [(0, 5), (1, 3), (3, 4)]:
        here = loader(folder[kind], batch_size=rows, epochs=2, threads=threads, prefetch=5)
        found = list(here)
        assert same(joined(found), {k: v[: rows * len(found)] for k, v in stream.items()})
        assert same(here.at(1), found[1])


@KINDS
@pytest.mark.parametrize("train", [True, False])
def test_resume_is_exact_in_the_middle_of_an_epoch(folder, kind, train):
    options = {"train": train, "epochs": 2}
    through = loader(folder[kind], batch_size=3, **options)
    states = [(batch, json.loads(json.dumps(through.state()))) for batch in through]
    for done in (0, 2, 3):
        resumed = loader(folder[kind], batch_size=3, **options)
        resumed.restore(states[done][1])
        assert resumed.epoch == 3 * (done + 1) / through.examples_per_epoch
        rest = [batch for batch, _ in states[done + 1 : done + 3]]
        assert all(map(same, islice(resumed, 2), rest))
    assert same(next(through.rewind()), states[0][0])


def test_each_image_comes_once_in_an_epoch_and_is_drawn_anew_in_the_next(folder):
    found = list(loader(folder["classes"], batch_size=15, epochs=2, shuffle=False))
    assert [batch["label"].tolist() for batch in found] == [[0] * 5 + [1] * 5 + [2] * 5] * 2
    assert all((a != b).any() for a, b in zip(found[0]["image"], found[1]["image"], strict=True))
    shuffled = list(loader(folder["classes"], batch_size=15, epochs=2))
    assert [sorted(batch["label"].tolist()) for batch in shuffled] == [
        found[0]["label"].tolist()
    ] * 2
    assert shuffled[0]["label"].tolist() != shuffled[1]["label"].tolist()


def test_another_seed_draws_other_pixels(folder):
    one, other = (loader(folder["classes"], 15, shuffle=False, seed=s).at(0) for s in (0, 1))
    assert (one["image"] != other["image"]).any((1, 2, 3)).all()


def test_what_is_drawn_is_that_of_every_version_and_machine():
    """Numbers written down: a change here breaks the resume of every run that is under way."""
    augment = ALL.of_kind("classes")
    assert random_crop(generator(7, 1, 5), 400, 300, augment) == (167, 21, 281, 135)
    changes = [(name, round(x, 4)) for name, x in color_factors(generator(7, 1, 6), augment)]
    assert changes == [("Contrast", 0.7825), ("Color", 1.2697), ("Brightness", 1.2679)]


RUN = """
import zlib
from itertools import islice
from hfjax.data.images import ImageLoader
loader = ImageLoader(place, 4, 16, threads=threads)
print(zlib.crc32(b"".join(b[k].tobytes() for b in islice(loader, 5) for k in sorted(b))))
"""


@pytest.mark.slow
def test_two_runs_give_the_same_bits(folder, capsys):
    place = f"place, threads = {str(folder['classes'])!r}, "
    there = [sys.executable, "-c", f"{place}2\n{RUN}"]
    done = subprocess.run(there, capture_output=True, check=True, text=True)
    exec(f"{place}0\n{RUN}", {})
    assert done.stdout == capsys.readouterr().out != ""


# -- batches ------------------------------------------------------------------------------


def test_batches_have_the_names_types_and_shapes_that_steps_take(folder):
    shapes = {k: (v.shape, v.dtype.name) for k, v in loader(folder["classes"]).at(0).items()}
    assert shapes == {"image": ((4, 16, 16, 3), "uint8"), "label": ((4,), "int32")}
    shapes = {k: (v.shape, v.dtype.name) for k, v in loader(folder["masks"]).at(0).items()}
    assert shapes == {"image": ((4, 16, 16, 3), "uint8"), "label": ((4, 16, 16), "int32")}


@KINDS
def test_evaluation_goes_over_everything_once_and_fills_the_last_batch_up(folder, kind):
    options = {"train": False, "epochs": 1, "pad_last": True}
    found = loader(folder[kind], batch_size=8, **options)
    batches = list(found)
    count = found.examples_per_epoch
    whole = joined(batches)
    assert len(batches) == len(found) == -(-count // 8)
    assert whole["mask"].dtype == np.float32
    assert whole["mask"].tolist() == [1.0] * count + [0.0] * (8 * len(batches) - count)
    assert (whole["label"][count:] == (0 if kind == "classes" else 255)).all()
    assert not whole["image"][count:].any()
    last = loader(folder[kind], batch_size=8, local_examples=[7], **options).at(len(batches) - 1)
    assert last["mask"].tolist() == [0.0]


def test_the_identity_tells_other_files_and_other_settings(folder, tmp_path):
    state = loader(folder["classes"]).state()
    others: list[dict[str, Any]] = [
        {"size": 17},
        {"seed": 4},
        {"augment": Augment()},
        {"shuffle": False},
    ]
    for more in others:
        with pytest.raises(ValueError, match=f"its {next(iter(more))} is .*, here it is"):
            loader(folder["classes"], **more).restore(state)
    loader(folder["classes"], batch_size=2, broken="skip", threads=0).restore(state)
    extra = folder["classes"] / "cat" / "new.png"
    smooth(1, 30, 30).save(extra)
    with pytest.raises(ValueError, match=r"its data is .*'images': 15.* here it is .*'images': 16"):
        loader(folder["classes"]).restore(state)
    extra.unlink()
    loader(folder["classes"]).restore(state)
    smooth(2, 31, 30).save(folder["classes"] / "cat" / "1.png")  # of another size in bytes
    with pytest.raises(ValueError, match="its data is"):
        loader(folder["classes"]).restore(state)


# -- as Pillow makes them -----------------------------------------------------------------


def near(one, other, most=1) -> bool:
    return np.abs(np.asarray(one, int) - np.asarray(other, int)).max() <= most


def test_training_cuts_and_resizes_as_pillow_does(folder):
    data = ImageSet(folder["classes"])
    rows = loader(data, 15, 16, shuffle=False, augment=Augment(flip=0)).at(0)["image"]
    augment = Augment(flip=0).of_kind("classes")
    for i, found in enumerate(rows):
        image = Image.open(data.path(i)).convert("RGB")
        part = image.crop(random_crop(generator(3, 0, i), *image.size, augment))
        np.testing.assert_array_equal(found, part.resize((16, 16), Image.Resampling.BILINEAR))
    flipped = loader(data, 15, 16, shuffle=False, augment=Augment(flip=1)).at(0)["image"]
    np.testing.assert_array_equal(flipped, rows[:, :, ::-1])


def test_evaluation_resizes_the_shorter_side_and_cuts_the_middle_out(folder):
    data = ImageSet(folder["classes"])
    rows = loader(data, 15, 14, train=False).at(0)["image"]
    for i, found in enumerate(rows):
        image = Image.open(data.path(i)).convert("RGB")
        short, long = min(image.size), max(image.size)
        sides = [16 if side == short else int(16 * long / short) for side in image.size]
        whole = image.resize((sides[0], sides[1]), Image.Resampling.BILINEAR)
        left, top = round((sides[0] - 14) / 2), round((sides[1] - 14) / 2)
        assert near(found, whole.crop((left, top, left + 14, top + 14)))


def test_evaluated_masks_are_whole_scaled_to_fit_and_filled_up_with_what_does_not_count(folder):
    data = ImageSet(folder["masks"])
    batch = loader(data, 7, 32, train=False).at(0)
    for i in range(7):
        image, mask = Image.open(data.path(i)), data.mask(i)
        scale = 32 / max(image.size)
        w, h = (round(side * scale) for side in image.size)
        assert max(w, h) == 32
        assert near(batch["image"][i, :h, :w], image.resize((w, h), Image.Resampling.BILINEAR))
        labels = Image.fromarray(mask).resize((w, h), Image.Resampling.NEAREST)
        np.testing.assert_array_equal(batch["label"][i, :h, :w], labels)
        for outside in (np.s_[h:], np.s_[:, w:]):
            assert (batch["label"][i][outside] == 255).all()
            assert (batch["image"][i][outside] == FILL).all()


def test_image_and_mask_are_cut_and_flipped_alike(tmp_path):
    """An image that is its own mask stays so: labels 0, 8, … are levels of grey."""
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for i in range(8):
        labels = np.kron(np.random.default_rng(i).integers(0, 30, (5, 6)), np.ones((12, 12))) * 8
        Image.fromarray(labels.astype(np.uint8)).save(tmp_path / "images" / f"{i}.png")
        Image.fromarray(labels.astype(np.uint8)).save(tmp_path / "masks" / f"{i}.png")
    batch = loader(ImageSet(tmp_path, classes=255), 8, 40, augment=None).at(0)
    counts, difference = batch["label"] < 255, batch["image"][..., 0] - batch["label"]
    assert 0.3 < counts.mean() < 1  # some are smaller than the square
    blurred = (difference != 0) & counts  # pixels beside an edge between two labels
    assert blurred.mean() < 0.25
    assert ((batch["image"] == FILL).all(-1) == ~counts).mean() > 0.999


def test_a_part_of_what_is_resized_is_what_the_whole_would_be(folder):
    image = smooth(0, 301, 201)  # odd sides: no place is between two pixels
    whole = image.resize((451, 300), Image.Resampling.BILINEAR)
    box = (37, 111, 200, 290)
    assert near(resize_and_crop(image, whole.size, box), whole.crop(box))
    labels = np.arange(201 * 301).reshape(201, 301) % 251
    mask = Image.fromarray(labels.astype(np.uint8)).resize(whole.size, Image.Resampling.NEAREST)
    found = resize_labels(labels, whole.size, box)
    np.testing.assert_array_equal(found, np.asarray(mask.crop(box)))


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 2), (7, 5)])
@pytest.mark.parametrize("train", [True, False])
def test_images_of_any_shape_fill_their_square(tmp_path, size, train):
    for name in ("images", "masks", "classes/one"):
        (tmp_path / name).mkdir(parents=True)
    Image.new("RGB", size, (10, 20, 30)).save(tmp_path / "images" / "0.png")
    Image.new("RGB", size, (10, 20, 30)).save(tmp_path / "classes" / "one" / "0.png")
    Image.new("L", size, 3).save(tmp_path / "masks" / "0.png")
    found = ImageLoader(tmp_path / "classes", 1, 24, train).at(0)
    assert (found["image"] == (10, 20, 30)).all()
    found = ImageLoader(tmp_path, 1, 24, train).at(0)
    counts = found["label"] == 3
    assert counts.any()
    assert (found["image"][counts] == (10, 20, 30)).all()
    assert (found["label"][~counts] == 255).all()


def test_colours_change_as_by_pillows_enhancers():
    image = smooth(0, 30, 20)
    found = adjust_colors(image, [("Contrast", 1.3), ("Brightness", 0.7), ("Color", 0.2)])
    wanted = ImageEnhance.Brightness(ImageEnhance.Contrast(image).enhance(1.3)).enhance(0.7)
    np.testing.assert_array_equal(found, ImageEnhance.Color(wanted).enhance(0.2))
    assert [*color_factors(generator(0, 0, 0), Augment())] == []


def test_crops_are_spread_over_areas_ratios_and_places():
    augment = Augment().of_kind("classes")
    boxes = np.array([random_crop(generator(0, 0, i), 100, 80, augment) for i in range(2000)])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    area = width * height / 8000
    assert 0.07 < area.min() < 0.1
    assert 0.45 < area.mean() < 0.56
    assert (np.abs(np.log(width / height)) < math.log(4 / 3) + 0.1).all()
    assert boxes.min() == 0
    assert (boxes[:, 2].max(), boxes[:, 3].max()) == (100, 80)
    assert central_crop(1000, 10, (3 / 4, 4 / 3)) == (493, 0, 506, 10)  # no crop of it was found
    assert random_crop(
        generator(0, 0, 0), 1000, 10, Augment(scale=(0.9, 1)).of_kind("classes")
    ) == (*(493, 0, 506, 10),)


# -- decoding -----------------------------------------------------------------------------


def stored() -> Iterator[tuple[str, Image.Image]]:
    image = smooth(0, 20, 14)
    yield "grey.png", image.convert("L")
    yield "grey_alpha.png", image.convert("LA")
    yield "two.png", image.convert("1")
    yield "palette.png", image.convert("P")
    yield "palette.gif", image.convert("P")
    yield "alpha.png", Image.merge("RGBA", (*image.split(), image.convert("L")))
    yield "inks.jpg", image.convert("CMYK")
    yield "plain.webp", image
    yield "plain.BMP", image


@pytest.mark.parametrize(
    ("name", "image"), [*stored()], ids=lambda x: x if isinstance(x, str) else ""
)
def test_every_mode_of_eight_bits_becomes_rgb_as_pillow_converts(tmp_path, name, image):
    image.save(tmp_path / name)
    found = read_image(tmp_path / name)
    assert found.mode == "RGB"
    np.testing.assert_array_equal(found, Image.open(tmp_path / name).convert("RGB"))


def test_a_palette_with_transparency_keeps_its_colours_without_a_warning(tmp_path, recwarn):
    image = smooth(0, 20, 14).convert("P")
    image.save(tmp_path / "a.png", transparency=bytes(range(256)))
    np.testing.assert_array_equal(read_image(tmp_path / "a.png"), image.convert("RGB"))
    assert not recwarn


@pytest.mark.parametrize("turn", range(1, 9))
def test_images_are_turned_as_their_exif_says(tmp_path, turn):
    exif = Image.Exif()
    exif[274] = turn
    for name in ("a.jpg", "a.png", "a.tif"):
        smooth(0, 20, 14).save(tmp_path / name, exif=exif)
        upright = ImageOps.exif_transpose(Image.open(tmp_path / name)).convert("RGB")
        assert upright.size == ((20, 14) if turn < 5 else (14, 20))
        np.testing.assert_array_equal(read_image(tmp_path / name), upright)


def test_a_mask_keeps_the_indices_of_its_palette(folder):
    mask = read_mask(folder["masks"] / "masks" / "0.png")
    assert (mask.dtype, set(np.unique(mask).tolist())) == (np.uint8, {0, 1, 2, 3, 255})


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["png", "tif", "pgm", "plain"])
def test_a_grey_mask_keeps_its_levels_in_any_number_of_bits(tmp_path, kind, bits):
    """Pillow stretches the levels of fewer bits to 255."""
    most = 2**bits - 1
    levels = np.random.default_rng(bits).integers(0, most + 1, (9, 13, 1), np.uint8)
    levels[0, :2, 0] = 0, most
    head = f"{'P5' if kind == 'pgm' else 'P2'} 13 9 {most}\n".encode()
    files = {
        "png": lambda: png(levels, bits),
        "tif": lambda: tiff(levels, bits),
        "pgm": lambda: head + levels.tobytes(),
        "plain": lambda: head + " ".join(map(str, levels.ravel())).encode(),
    }
    path = tmp_path / f"a.{kind}"
    path.write_bytes(files[kind]())
    np.testing.assert_array_equal(read_mask(path), levels[..., 0])


# -- what a folder is ---------------------------------------------------------------------


def test_classes_are_the_sorted_names_of_folders_and_litter_is_not_there(folder):
    place = folder["classes"]
    (place / "cat" / ".DS_Store").write_bytes(b"x")
    (place / "Thumbs.db").write_bytes(b"x")
    (place / ".cache").mkdir()
    (place / "cat" / "notes.txt").write_text("x")
    (place / "cat" / "more").mkdir()
    smooth(0, 20, 20).save(place / "cat" / "more" / "1.jpg")
    data = ImageSet(place)
    assert (data.kind, data.classes, len(data), data.passed_over) == ("classes", [*CLASSES], 16, 1)
    assert "cat/more/1.jpg" in data.names
    assert str(data) == f"{place}: 16 images of 3 classes"
    assert repr(data) == f"ImageSet({place}: 16 images of 3 classes)"


def test_labels_follow_the_classes_of_another_set(folder, tmp_path):
    valid = photos(tmp_path / "valid", 2, ("owl", "cat"))
    data = ImageSet(valid, classes=["ant", "cat", "dog", "owl"])
    assert data.labels.tolist() == [1, 1, 3, 3]


def test_classes_of_masks_are_named_counted_or_found(folder):
    place = folder["masks"]
    assert ImageSet(place).classes == ["0", "1", "2", "3"]
    assert ImageSet(place, classes=6).classes == ["0", "1", "2", "3", "4", "5"]
    (place / "classes.txt").write_text("road\nhouse\nsky\ntree\n\n")
    data = ImageSet(place)
    assert (data.classes, data.passed_over) == (["road", "house", "sky", "tree"], 0)
    assert str(data) == f"{place}: 7 images with masks of 4 classes"


def test_parts_are_taken_by_name_and_a_class_called_train_is_none(tmp_path):
    photos(tmp_path / "split" / "train")
    photos(tmp_path / "split" / "val", 2)
    assert list(parts_of(tmp_path / "split")) == ["train", "valid"]
    assert len(ImageSet(tmp_path / "split", "valid")) == 6
    assert loader(tmp_path / "split").examples_per_epoch == 15
    assert loader(tmp_path / "split", train=False).examples_per_epoch == 6
    vehicles = photos(tmp_path / "vehicles", 1, ("car", "train"))
    assert parts_of(vehicles) == {}
    assert ImageSet(vehicles, "train").classes == ["car", "train"]
    street(tmp_path / "city" / "train")
    (tmp_path / "city" / "classes.txt").write_text("a\nb\nc\nd")
    assert ImageSet(tmp_path / "city", "train").classes == ["a", "b", "c", "d"]


def test_broken_images_are_skipped_alike_on_all_processes(folder):
    broken = [folder["classes"] / "dog" / name for name in ("1.png", "2.jpg")]
    for path in broken:
        path.write_bytes(path.read_bytes()[:150])
    options = {"batch_size": 5, "train": False, "broken": "skip", "epochs": 1}
    whole = loader(folder["classes"], **options)
    parts = [loader(folder["classes"], local_examples=[p], **options) for p in range(5)]
    batches = [batch for batch in whole]
    assert all(same(b, joined(each)) for b, *each in zip(batches, *parts, strict=True))
    assert (batches[1]["image"][1] == batches[1]["image"][3]).all()  # the next that decodes
    assert whole.skipped == ["dog/1.png", "dog/2.jpg"]
    assert [part.skipped for part in parts] == [[], whole.skipped, ["dog/2.jpg"], [], []]
    last = folder["classes"] / "owl" / "4.jpg"
    last.write_bytes(b"")
    assert loader(folder["classes"], **options).at(2)["label"].tolist() == [2, 2, 2, 2, 0]


# -- what is told of a folder -------------------------------------------------------------


def test_a_report_tells_classes_sizes_modes_and_what_is_broken(folder):
    smooth(0, 20, 300).convert("L").save(folder["classes"] / "cat" / "grey.png")
    path = folder["classes"] / "owl" / "0.jpg"
    path.write_bytes(b"none")
    told = format_report(examine(ImageSet(folder["classes"])))
    assert told[2:6] == ["class  images", "cat         6", "dog         5", "owl         5"]
    assert "largest 20 x 300" in told[7]
    assert told[8:10] == ["modes: RGB 14, L 1", "cannot be used: 1"]
    assert told[10].startswith(f"  {path} does not decode: ")


def test_a_report_of_masks_counts_labels(folder):
    Image.fromarray(np.full((9, 9), 9, np.uint8)).save(folder["masks"] / "masks" / "6.png")
    smooth(0, 9, 9).save(folder["masks"] / "images" / "6.jpg")
    told = format_report(examine(ImageSet(folder["masks"], classes=4)))
    assert [line.split()[:3] for line in told[3:8]] == [
        *([str(n), str(n), "6"] for n in range(4)),
        ["(ignored)", "255", "6"],
    ]
    assert told[-1].endswith(
        "0 to 3, and 255 for what does not count; `hfjax data "
        f"{folder['masks']}` names all such masks."
    )
