"""With torchvision at hand: the same crops, resizes, colours and labels as its references have.

Slow, and skipped where it is not installed.
"""

import numpy as np
import pytest
from PIL import Image

from hfjax.data.images import Augment, ImageLoader, ImageSet
from hfjax.data.images.augment import central_crop, generator, random_crop
from hfjax.data.images.pixels import adjust_colors, crop_and_resize, resize_labels
from tests.small_images import photos, sides, smooth

torch = pytest.importorskip("torch")
torchvision = pytest.importorskip("torchvision")
transforms = pytest.importorskip("torchvision.transforms")
theirs_on = pytest.importorskip("torchvision.transforms.functional")

pytestmark = pytest.mark.slow
BILINEAR = transforms.InterpolationMode.BILINEAR
NEAREST = transforms.InterpolationMode.NEAREST


def test_a_crop_of_training_is_that_of_torchvision():
    for i in range(20):
        image = smooth(i, 50 + 7 * i, 90)
        box = random_crop(generator(0, 0, i), *image.size, Augment().of_kind("classes"))
        left, top, right, bottom = box
        place = top, left, bottom - top, right - left
        wanted = theirs_on.resized_crop(image, *place, [32, 32], BILINEAR)
        np.testing.assert_array_equal(crop_and_resize(image, box, 32), wanted)


@pytest.mark.parametrize("size", [32, 50, 224])
def test_evaluated_images_are_those_of_torchvision_within_a_level(tmp_path, size):
    data = ImageSet(photos(tmp_path / "photos"))
    wanted = transforms.Compose(
        [transforms.Resize(round(size * 256 / 224)), transforms.CenterCrop(size)]
    )
    batch = ImageLoader(data, len(data), size, train=False).at(0)
    for found, path in zip(batch["image"], map(data.path, range(len(data))), strict=True):
        theirs = np.asarray(wanted(Image.open(path).convert("RGB")), int)
        assert np.abs(found.astype(int) - theirs).max() <= 1


def test_colours_are_those_of_torchvision():
    image = smooth(0, 40, 30)
    ours = adjust_colors(image, [("Brightness", 0.6), ("Contrast", 1.4), ("Color", 1.7)])
    theirs = theirs_on.adjust_brightness(image, 0.6)
    theirs = theirs_on.adjust_contrast(theirs, 1.4)
    np.testing.assert_array_equal(ours, theirs_on.adjust_saturation(theirs, 1.7))


def test_crops_are_spread_as_those_of_torchvision_and_end_in_the_same_middle():
    torch.manual_seed(0)
    image = smooth(0, 120, 80)
    theirs = transforms.RandomResizedCrop.get_params
    boxes = np.array([theirs(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)])
    augment = Augment().of_kind("classes")
    ours = np.array([random_crop(generator(1, 0, i), 120, 80, augment) for i in range(4000)])
    ours = np.stack([ours[:, 1], ours[:, 0], ours[:, 3] - ours[:, 1], ours[:, 2] - ours[:, 0]], 1)
    for of in (np.mean, np.std):
        np.testing.assert_allclose(of(ours, 0), of(boxes, 0), rtol=0.06)
    for width, height in ((900, 10), (10, 900), (1, 700)):
        top, left, h, w = theirs(smooth(0, width, height), [0.9, 1.0], [3 / 4, 4 / 3])
        assert central_crop(width, height, (3 / 4, 4 / 3)) == (left, top, left + w, top + h)


def test_masks_are_resized_as_by_torchvision():
    for i in range(20):
        width, height = (side | 1 for side in sides(i))  # odd: no place is between two pixels
        labels = np.random.default_rng(i).integers(0, 21, (height, width), np.uint8)
        whole = width * 3 // 2, height * 2 // 3
        theirs = theirs_on.resize(Image.fromarray(labels), [whole[1], whole[0]], NEAREST)
        np.testing.assert_array_equal(resize_labels(labels, whole, (0, 0, *whole)), theirs)


def test_files_and_labels_are_those_of_its_image_folder(tmp_path):
    place = photos(tmp_path / "photos", 12)
    data, theirs = ImageSet(place), torchvision.datasets.ImageFolder(str(place))
    assert data.classes == theirs.classes
    found = [(str(data.path(i)), int(data.labels[i])) for i in range(len(data))]
    assert found == theirs.samples
