"""What is wrong with folders of images, files and settings is told: where, and what to do."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hfjax.__main__ import main
from hfjax.data import Loader, TokenSet
from hfjax.data.images import Augment, ImageLoader, ImageSet, check_same_classes
from hfjax.data.images.decode import PHOTOMETRIC, pillow, read_image, read_mask
from tests.small_images import photos, png, smooth, street, tiff
from tests.token_sets import numbered


def refused(message: str, place: Path, *args: Any, **options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        ImageSet(place, *args, **options)


# -- folders ------------------------------------------------------------------------------


def test_what_is_no_folder_of_images(tmp_path):
    refused("nothing: no such directory. A folder of images is expected", tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    refused("file: it is a file. A folder of images is expected", tmp_path / "file")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".DS_Store").write_bytes(b"x")
    refused("empty is empty. Put the images of each class into a folder", tmp_path / "empty")


def test_a_folder_without_classes(tmp_path):
    smooth(0, 20, 20).save(tmp_path / "1.jpg")
    refused(r"has no folders of classes; it holds images \(1\). Put the images", tmp_path)
    (tmp_path / "1.jpg").rename(tmp_path / "1.txt")
    refused(r"it holds no image \(other files: 1\)", tmp_path)
    place = street(tmp_path / "street")
    refused(f"Or open {place}, which has the masks", place / "images")


def test_a_class_without_images(tmp_path):
    place = photos(tmp_path / "photos")
    (place / "bat").mkdir()
    (place / "bat" / "1.txt").write_text("x")
    refused("class bat has no image: .*bat holds 1 other files. Add images, or remove", place)


def test_a_folder_of_parts_is_opened_one_at_a_time(tmp_path):
    photos(tmp_path / "train")
    refused("holds parts: open .*/train, one at a time, or say part='train'", tmp_path)
    refused(f"{tmp_path} has no part valid: it has train", tmp_path, "valid")
    refused("part='test': one of train, valid", tmp_path, "test")


def test_tokens_where_images_are_expected_and_images_where_tokens_are(tmp_path):
    tokens = numbered(tmp_path / "tokens", [9])
    refused("tokens is a data set of tokens, not of images: hfjax.data.TokenSet", tokens.directory)
    with pytest.raises(ValueError, match=r"is a data set of tokens, not of images"):
        ImageLoader(tmp_path / "tokens", 4, 16)
    with pytest.raises(ValueError, match=r"data is a TokenSet: .* read by hfjax.data.Loader"):
        ImageLoader(tokens, 4, 16)  # pyright: ignore[reportArgumentType]
    numbered(tmp_path / "split" / "train", [9])
    refused("split is a data set of tokens", tmp_path / "split")
    photos(tmp_path / "photos" / "train")
    message = "photos holds images, not tokens: hfjax.data.images.ImageSet opens it, and hfjax data"
    for opened in (TokenSet, lambda place: Loader(place, 4, 8)):
        with pytest.raises(ValueError, match=message):
            opened(tmp_path / "photos")


def test_other_classes_to_validate_on_than_to_train_on(tmp_path):
    train = ImageSet(photos(tmp_path / "train"))
    valid = ImageSet(photos(tmp_path / "valid", 1, ("cat", "cow", "owl", "yak")))
    message = "has 3 classes and .*valid 4; only the first has dog and only the second has cow, yak"
    with pytest.raises(ValueError, match=message):
        check_same_classes(train, valid)
    with pytest.raises(ValueError, match="their order is another one"):
        check_same_classes(train, ImageSet(tmp_path / "train", classes=["owl", "dog", "cat"]))
    message = "folders of classes that are not among the 3 asked for: cow, yak. Remove them"
    refused(message, tmp_path / "valid", classes=train.classes)
    masks = ImageSet(street(tmp_path / "street"))
    with pytest.raises(ValueError, match=r"train is a set of classes, .*street one of masks"):
        check_same_classes(train, masks)
    check_same_classes(masks, ImageSet(tmp_path / "street", classes=3))
    with pytest.raises(ValueError, match="only the second has 4, 5, 6, 7, 8 and 1 more"):
        check_same_classes(masks, ImageSet(tmp_path / "street", classes=10))


def test_names_of_classes_that_are_none(tmp_path):
    place = photos(tmp_path / "photos")
    refused("classes=3: .*photos has folders of classes; give names", place, classes=3)
    refused("classes: 'cat' is empty, no text, or comes twice", place, classes=["cat", "cat"])
    refused("classes='cat': a list of names is expected", place, classes="cat")
    city = street(tmp_path / "street")
    refused("classes=256: masks have 1 to 255 classes", city, classes=256)
    refused("classes=0: masks have 1 to 255 classes", city, classes=0)
    (city / "classes.txt").write_text("road\n\nsky\n")
    refused("classes.txt: '' is empty, no text, or comes twice", city)
    (city / "classes.txt").write_text("\n")
    refused("classes.txt: there is none. Names of classes are expected", city)
    (city / "classes.txt").write_bytes("Straße\nHaus\na\nb\n".encode("latin1"))
    refused("classes.txt is not UTF-8: byte 4 is 0xdf. Convert it", city)
    (city / "classes.txt").write_bytes(b"\xef\xbb\xbfroad\r\nsky\r\na\r\nb\r\n")
    assert ImageSet(city).classes == ["road", "sky", "a", "b"]
    (city / "classes.txt").unlink()
    (city / "classes.txt").symlink_to("names.txt")
    refused("classes.txt is a link to names.txt, which is not there", city)


def test_folders_that_lead_into_themselves_and_names_that_are_no_files(tmp_path):
    place = photos(tmp_path / "photos")
    (place / "cat" / "again").symlink_to(place / "cat")
    refused("again leads to a folder that is there already: .*photos/cat. Take the link", place)
    (place / "cat" / "again").unlink()
    (place / "cat" / "gone.jpg").symlink_to(tmp_path / "gone.jpg")
    refused("gone.jpg is a link to .*gone.jpg, which is not there: an ordinary file", place)


# -- masks --------------------------------------------------------------------------------


def test_an_image_without_a_mask_and_two_of_one_name(tmp_path):
    place = street(tmp_path / "street")
    (place / "masks" / "3.png").unlink()
    (place / "masks" / "4.png").unlink()
    refused("2 of 7 images in .*images have no mask, the first is 3.jpg: masks/3.png", place)
    (place / "masks" / "0.bmp").write_bytes(b"")
    refused("masks has 0.bmp and 0.png: which one is meant", place)
    (place / "masks" / "0.png").unlink()
    (place / "masks" / "0.bmp").unlink()
    for name in (0, 3, 4):
        (place / "masks" / f"{name}.jpg").write_bytes(b"")
    refused("masks/0.jpg: JPEG changes labels. Write masks as PNG", place)
    street(tmp_path / "other", 1)
    (tmp_path / "other" / "images" / "0.jpg").unlink()
    refused(r"images holds no image \(0 other files\)", tmp_path / "other")
    (tmp_path / "alone" / "images").mkdir(parents=True)
    refused("alone has images/ and no masks/. Give each image a mask", tmp_path / "alone")


def test_a_mask_of_another_size_or_kind_than_its_image(tmp_path):
    place = street(tmp_path / "street", 3)
    data = ImageSet(place)
    Image.new("L", (9, 8)).save(place / "masks" / "1.png")
    with pytest.raises(ValueError, match=r"masks/1.png has 9 x 8 pixels, its image \d+ x \d+"):
        data[1]
    Image.new("RGB", (9, 8)).save(place / "masks" / "1.png")
    with pytest.raises(ValueError, match=r"masks/1.png has mode RGB: a mask has one label"):
        data[1]
    with pytest.raises(ValueError, match=r"masks/1.png has mode RGB"):
        ImageSet(place)  # looks for the largest label


def test_labels_beyond_the_classes_are_counted_by_file(tmp_path):
    place = street(tmp_path / "street", 3)
    labels = np.zeros((8, 9), np.uint8)
    labels[:2], labels[5, 5], labels[7] = 7, 9, 255
    Image.fromarray(labels).save(place / "masks" / "1.png")
    smooth(0, 9, 8).save(place / "images" / "1.jpg")
    message = r"masks/1.png has labels beyond the 4 classes: 7 \(18 pixels\), 9 \(1 pixels\)"
    with pytest.raises(ValueError, match=message):
        next(ImageLoader(ImageSet(place, classes=4), 3, 16))
    assert len(ImageSet(place).classes) == 10
    for path in (place / "masks").iterdir():
        Image.new("L", (9, 8), 255).save(path)
    refused("masks: every label is 255, which does not count", place)


# -- files --------------------------------------------------------------------------------

DAMAGE = {
    "nothing": lambda data: b"",
    "text": lambda data: b"<html>" * 50,
    "cut": lambda data: data[: len(data) // 2],
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.gif", "a.webp", "a.bmp", "a.tif"])
def test_an_image_that_does_not_decode_is_named(tmp_path, name, damage):
    path = tmp_path / name
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 60, 3), np.uint8)).save(path)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    skips = "broken='skip' .--data.on-broken-image skip. takes the next"
    with pytest.raises(ValueError, match=rf"{path} does not decode: .*{skips}"):
        read_image(path)


def test_broken_images_end_a_run_unless_they_are_skipped_and_one_is_left(tmp_path):
    place = photos(tmp_path / "photos", 1)
    for path in place.glob("*/*"):
        path.write_bytes(b"x")
    with pytest.raises(ValueError, match=r"cat/0.jpg does not decode: .*\. Copy it again, or take"):
        next(ImageLoader(place, 3, 16, shuffle=False))
    with pytest.raises(
        ValueError, match="photos: 3 images of 3 classes: none of its images decodes"
    ):
        next(ImageLoader(place, 3, 16, broken="skip"))


def test_a_file_that_is_gone_is_not_skipped(tmp_path):
    place = photos(tmp_path / "photos", 1)
    loader = ImageLoader(place, 3, 16, broken="skip")
    (place / "cat" / "0.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"is gone .*Put it back.*: '.*cat/0.jpg'"):
        next(loader)


def test_images_of_sixteen_bits_are_refused(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(path)
    with pytest.raises(ValueError, match=rf"{path} has mode I.*, 16 or 32 bits for a level"):
        read_image(path)
    with pytest.raises(ValueError, match=rf"{path} has mode I.*: a mask has one label"):
        read_mask(path)
    for mode, kind in (("F", "tif"), ("I", "tif"), ("LAB", "tif")):
        Image.new(mode, (8, 8)).save(tmp_path / f"{mode}.{kind}")
        with pytest.raises(ValueError, match=rf"has mode {mode}, .*images of 8 bits are read"):
            read_image(tmp_path / f"{mode}.{kind}")


@pytest.mark.parametrize("name", ["RGB", "RGBA", "LA", "ppm", "pgm", "plain", "tif"])
def test_images_of_sixteen_bits_in_any_form_are_refused(tmp_path, name):
    """Pillow reads them as of 8 bits and drops the low byte."""
    path, pixels = tmp_path / "a.png", np.arange(200, 200 + 8 * 8 * 4).reshape(8, 8, 4)
    netpbm = lambda head, form: f"{head} 8 8 65535\n".encode() + form(pixels[..., :3])
    big = lambda x: x.astype(">u2").tobytes()
    files = {
        "RGB": lambda: png(pixels[..., :3], 16),
        "RGBA": lambda: png(pixels, 16),
        "LA": lambda: png(pixels[..., :2], 16),
        "ppm": lambda: netpbm("P6", big),
        "pgm": lambda: netpbm("P5", lambda x: big(x[..., 0])),
        "plain": lambda: netpbm("P3", lambda x: " ".join(map(str, x.ravel())).encode()),
        "tif": lambda: tiff(pixels[..., :3], 16),
    }
    path.write_bytes(files[name]())
    with pytest.raises(ValueError, match=r"16 or 32 bits for a level: images of 8 bits are read"):
        read_image(path)


def test_an_image_that_would_fill_memory_is_refused_before_it_is_decoded(tmp_path):
    place = photos(tmp_path / "photos", 1)
    Image.new("1", (9000, 8000)).save(place / "cat" / "0.png")
    message = (
        r"cat/0.png is too large to be decoded \(9000 x 8000 pixels, 206.0 MiB of memory\): at "
        r"most 67108864 pixels are. .* give ImageSet\(…, most_pixels=…\)"
    )
    with pytest.raises(ValueError, match=message):
        ImageSet(place)[1]
    assert ImageSet(place, most_pixels=72_000_000)[1][0].size == (9000, 8000)
    Image.new("1", (20000, 10000)).save(place / "cat" / "0.png")
    with pytest.raises(ValueError, match=r"cat/0.png is too large to be decoded \(.*200000000 pix"):
        ImageSet(place)[1]
    refused("most_pixels=0: a whole number from 1 on", place, most_pixels=0)


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    pillow.cache_clear()
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    message = re.escape("reading images needs the package pillow: pip install 'hfjax[images]'")
    refused(message, photos_by_name(tmp_path))
    pillow.cache_clear()


def photos_by_name(folder: Path) -> Path:
    (folder / "cat").mkdir()
    (folder / "cat" / "1.jpg").write_bytes(b"x")
    return folder


# -- settings -----------------------------------------------------------------------------

REFUSED = {
    "batch_size=0: a whole number from 1": {"batch_size": 0},
    "size=0: a whole number from 1": {"size": 0},
    "size=-1: a whole number from 1": {"size": -1},
    "size=16.0: a whole number from 1": {"size": 16.0},
    "seed=-1: a whole number from 0": {"seed": -1},
    "threads=-1: a whole number from 0": {"threads": -1},
    "prefetch=1: a whole number from 2": {"threads": 2, "prefetch": 1},
    "resize=15: a whole number from 16": {"resize": 15},
    "train=1: True or False": {"train": 1},
    "shuffle=1: True or False": {"shuffle": 1},
    "epochs=0: a whole number from 1 on, or None": {"epochs": 0},
    "pad_last=True: without epochs": {"pad_last": True},
    r"local_examples=\[4\]: the numbers .* from 0 to 3": {"local_examples": [4]},
    r"local_examples=\[0, 0\]: the numbers .* from 0 to 3, each once": {"local_examples": [0, 0]},
    "broken='ignore': one of refuse, skip": {"broken": "ignore"},
    r"a batch of 16 examples: .*photos has 15 images. Lower batch_size": {"batch_size": 16},
    r"scale=\(0.5, 2\): of classes a part of the area, at most 1": {
        "augment": lambda: Augment(scale=(0.5, 2))
    },
    r"scale=\(0, 1\): the least and the largest, both above 0": {
        "augment": lambda: Augment(scale=(0, 1))
    },
    r"ratio=\(2, 1\): the least comes first": {"augment": lambda: Augment(ratio=(2, 1))},
    "flip=2: how often, from 0 to 1": {"augment": lambda: Augment(flip=2)},
    "contrast=-1: a number from 0 on": {"augment": lambda: Augment(contrast=-1)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_means_nothing_is_refused(tmp_path, message):
    given = {"batch_size": 4, "size": 16} | REFUSED[message]
    place = photos(tmp_path / "photos")
    make = given.pop("augment", lambda: None)
    with pytest.raises(ValueError, match=message):
        ImageLoader(place, **given, augment=make())


def test_a_keyword_that_is_misspelt_and_a_model_with_too_few_classes(tmp_path):
    place = photos(tmp_path / "photos")
    with pytest.raises(TypeError, match=r"has no keyword 'sed'. Did you mean seed"):
        ImageLoader(place, 4, 16, sed=1)  # pyright: ignore[reportCallIssue]
    loader = ImageLoader(place, 4, 16)
    loader.check(classes=3)
    with pytest.raises(ValueError, match=r"photos has 3 classes, the model 2. Give the model 3"):
        loader.check(classes=2)


# -- the command --------------------------------------------------------------------------


def test_the_command_tells_what_is_in_a_folder_of_images(tmp_path, capsys):
    photos(tmp_path / "photos" / "train")
    photos(tmp_path / "photos" / "valid", 2)
    (tmp_path / "photos" / "train" / "notes.txt").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    assert main(["data", str(tmp_path / "photos")]) == 0
    told = capsys.readouterr().out
    assert "train: 15 images of 3 classes\n" in told
    assert "valid: 6 images of 3 classes\n" in told
    assert "modes: RGB 15\nother files, not read: 1\n" in told
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_names_what_is_broken_and_fails(tmp_path, capsys):
    place = street(tmp_path / "street")
    (place / "images" / "2.jpg").write_bytes(b"x")
    (place / "masks" / "4.png").write_bytes(b"x")
    assert main(["data", str(place)]) == 1
    told = capsys.readouterr().out.splitlines()
    assert "cannot be used: 2" in told
    assert [line for line in told if "images/2.jpg does not decode" in line]
    assert [line for line in told if "masks/4.png does not decode" in line]


SOMEWHERE = ["--data-dir", "x"]
COMMANDS = {
    "--data-dir x: .* holds images, which are read in place, so nothing is written": SOMEWHERE,
    "--vocab: .* holds images; leave it out": ["--vocab", "300"],
    "--append-end: .* holds images; leave it out": ["--no-append-end"],
}


@pytest.mark.parametrize("message", COMMANDS)
def test_what_goes_with_text_only_is_refused(tmp_path, message, capsys):
    place = street(tmp_path / "street")
    (place / "classes.txt").write_text("a\nb\nc\nd\n")
    assert main(["data", str(place), *COMMANDS[message]]) == 2
    assert re.match(f"hfjax data: {message}", capsys.readouterr().err)


def test_two_folders_and_other_classes_are_refused_by_the_command(tmp_path, capsys):
    place = photos(tmp_path / "photos" / "train")
    photos(tmp_path / "photos" / "valid", 2, ("cat", "cow", "owl"))
    assert main(["data", str(place), str(tmp_path / "photos" / "valid")]) == 2
    assert "of folders of images give one at a time" in capsys.readouterr().err
    assert main(["data", str(tmp_path / "photos")]) == 2
    assert "only the second has cow" in capsys.readouterr().err
    assert main(["data", "--show", str(place)]) == 2
    assert "train holds images, not tokens" in capsys.readouterr().err


def test_texts_beside_pictures_stay_text(tmp_path, capsys):
    photos(tmp_path / "docs" / "pictures")
    (tmp_path / "docs" / "page.md").write_text("A page with a picture.")
    assert main(["data", str(tmp_path / "docs"), "--data-dir", str(tmp_path / "out")]) == 0
    assert "files of another kind, not read: 15" in capsys.readouterr().out
    assert len(TokenSet(tmp_path / "out")) == 23


def test_masks_whose_labels_would_be_read_as_others_are_refused(tmp_path):
    labels = Image.fromarray(np.arange(20, dtype=np.uint8).reshape(4, 5))
    labels.save(tmp_path / "lossy.png", format="JPEG")
    labels.save(tmp_path / "inverted.tif", tiffinfo={PHOTOMETRIC: 0})
    with pytest.raises(ValueError, match=r"lossy.png is a JPEG, which changes pixels: its labels"):
        read_mask(tmp_path / "lossy.png")
    with pytest.raises(ValueError, match=r"inverted.tif is a TIFF in which 0 is white"):
        read_mask(tmp_path / "inverted.tif")
