"""The images of a folder: by classes, or paired with masks; nothing is decoded."""

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hfjax.utils.image_names import is_folder, is_image, is_litter
from hfjax.utils.read_files import FOLDER, MISSING, check_ordinary, contents, not_utf8, what_is
from hfjax.utils.tables import named

PARTS = {"train": ("train",), "valid": ("valid", "val")}
IMAGES, MASKS, CLASSES = "images", "masks", "classes.txt"
TOKENS = "meta.json"  # what makes a folder a data set of tokens
LOSSY = (".jpg", ".jpeg", ".jpe", ".jfif")  # labels do not survive them
HOW = (
    "Put the images of each class into a folder of its own (cat/1.jpg), or images and their masks "
    "into images/ and masks/."
)


@dataclass(frozen=True)
class Below:
    """Images below a folder: names relative to it, sorted, with sizes in bytes; others counted."""

    names: list[str]
    sizes: list[int]
    others: int


def images_below(folder: Path) -> Below:
    """Return the images in a folder and in those inside it; hidden ones are not there."""
    found: list[tuple[str, int]] = []
    others, waiting, seen = 0, [(folder, "")], set()
    while waiting:
        place, prefix = waiting.pop()
        if (real := os.path.realpath(place)) in seen:
            raise ValueError(
                f"{named(place)} leads to a folder that is there already: {named(real)}. Take the "
                "link out."
            )
        seen.add(real)
        for entry in _entries(place):
            name = prefix + entry.name
            if is_folder(entry):
                waiting.append((Path(entry.path), f"{name}/"))
            elif is_image(name):
                check_ordinary(Path(entry.path))
                found.append((name, entry.stat().st_size))
            else:
                others += 1
    found.sort()
    return Below([name for name, _ in found], [size for _, size in found], others)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not is_litter(entry.name)]


def folders_in(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted."""
    return sorted(entry.name for entry in _entries(folder) if is_folder(entry))


def lying_in(folder: Path) -> tuple[int, int]:
    """Return how many images and how many other files lie in a folder itself."""
    files = [entry.name for entry in _entries(folder) if not is_folder(entry)]
    images = sum(map(is_image, files))
    return images, len(files) - images


def parts_of(directory: str | Path) -> dict[str, Path]:
    """Return the folders of the parts `train` and `valid` (or `val`) of a folder of images.

    A part has folders of its own, of classes or images and masks: `train/` with images in it is a
    class. There is no part in a folder that is not split.

    Args:
        directory: A folder of images.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from hfjax.data.images import parts_of
        >>> folder = tempfile.TemporaryDirectory()
        >>> Path(folder.name, "train", "cat").mkdir(parents=True)
        >>> list(parts_of(folder.name))
        ['train']
    """
    folder = Path(directory)
    found = {}
    for part, names in PARTS.items():
        for name in names:
            place = folder / name
            if place.is_dir() and folders_in(place) and not lying_in(place)[0]:
                found.setdefault(part, place)
    return found


def part_of(directory: Path, part: str | None) -> Path:
    """Return the folder of a part, or the folder itself if it is not split."""
    _check_folder(directory)
    if part is not None and part not in PARTS:
        raise ValueError(f"part={part!r}: one of {', '.join(PARTS)}.")
    parts = parts_of(directory)
    if not parts:
        return directory
    if part is None:
        inside = " and ".join(named(place) for place in parts.values())
        raise ValueError(
            f"{named(directory)} holds parts: open {inside}, one at a time, or say part='train'."
        )
    if part not in parts:
        raise ValueError(
            f"{named(directory)} has no part {part}: it has {', '.join(parts)}. Make a folder "
            f"{part}/ beside it, or give another directory."
        )
    return parts[part]


def _check_folder(directory: Path) -> None:
    """Refuse what is no folder, and a data set of tokens."""
    if (kind := what_is(directory)) != FOLDER:
        what = "no such directory" if kind == MISSING else f"it is {kind}"
        raise ValueError(f"{named(directory)}: {what}. A folder of images is expected.")
    places = [directory, *(directory / name for names in PARTS.values() for name in names)]
    if any((place / TOKENS).is_file() for place in places):
        raise ValueError(
            f"{named(directory)} is a data set of tokens, not of images: hfjax.data.TokenSet opens "
            "it. Here a folder of images is expected."
        )


def has_masks(directory: Path) -> bool:
    """Return whether a folder holds images and masks, not classes; refuse one of the two alone."""
    folders = folders_in(directory)
    if IMAGES in folders and MASKS in folders:
        return True
    for there, gone in ((IMAGES, MASKS), (MASKS, IMAGES)):
        if folders == [there]:
            raise ValueError(
                f"{named(directory)} has {there}/ and no {gone}/. Give each image a mask of the "
                f"same name ({IMAGES}/1.jpg, {MASKS}/1.png), or name the folder as its class."
            )
    return False


def class_folders(directory: Path) -> list[str]:
    """Return the names of the folders of classes, sorted; refuse a folder that has none."""
    if folders := folders_in(directory):
        return folders
    images, others = lying_in(directory)
    if not images + others:
        raise ValueError(f"{named(directory)} is empty. {HOW}")
    above = directory.name in (IMAGES, MASKS) and directory.with_name(MASKS).is_dir()
    how = f"Or open {named(directory.parent)}, which has the masks." if above else ""
    held = f"images ({images})" if images else f"no image (other files: {others})"
    raise ValueError(f"{named(directory)} has no folders of classes; it holds {held}. {HOW} {how}")


def paired(directory: Path, images: Below, masks: Below) -> list[str]:
    """Return the name of the mask of each image: the same name but for what is after the dot."""
    by_stem = _by_stem(directory / MASKS, masks.names)
    _by_stem(directory / IMAGES, images.names)
    alone = [name for name in images.names if _stem(name) not in by_stem]
    if alone:
        raise ValueError(
            f"{len(alone)} of {len(images.names)} images in {named(directory / IMAGES)} have no "
            f"mask, the first is {named(alone[0])}: {MASKS}/{named(_stem(alone[0]))}.png is "
            "expected. Add the masks, or move these images away."
        )
    found = [by_stem[_stem(name)] for name in images.names]
    for name in found:
        if name.lower().endswith(LOSSY):
            raise ValueError(
                f"{named(directory / MASKS / name)}: JPEG changes labels. Write masks as PNG."
            )
    return found


def _by_stem(folder: Path, names: list[str]) -> dict[str, str]:
    twice = [stem for stem, times in Counter(map(_stem, names)).items() if times > 1]
    if twice:
        same = [name for name in names if _stem(name) == twice[0]]
        raise ValueError(
            f"{named(folder)} has {' and '.join(map(named, same))}: which one is meant? Keep one."
        )
    return {_stem(name): name for name in names}


def _stem(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(""))


def written_classes(directory: Path) -> list[str] | None:
    """Return the names in classes.txt, of the folder or of that which it is a part of."""
    places = [directory]
    if any(directory.name in names for names in PARTS.values()):
        places.append(directory.parent)
    for place in places:
        if os.path.lexists(path := place / CLASSES):
            lines = [line.strip() for line in _text_of(path).strip().splitlines()]
            return checked_names(lines, named(path))
    return None


def _text_of(path: Path) -> str:
    """Return the text of a file, without a byte order mark."""
    try:
        return contents(path).removeprefix("\ufeff")
    except UnicodeDecodeError as wrong:
        raise ValueError(f"{not_utf8(named(path), wrong)}.") from None


def checked_names(names: Iterable[str], where: str) -> list[str]:
    """Return names of classes; refuse none, empty ones and one that comes twice."""
    if isinstance(names, str):
        raise ValueError(f"{where}={names!r}: a list of names is expected.")
    given = list(names)
    wrong = [name for name in given if not isinstance(name, str) or not name]
    wrong += [name for name, times in Counter(given).items() if times > 1]
    if wrong or not given:
        what = f"{wrong[0]!r} is empty, no text, or comes twice" if given else "there is none"
        raise ValueError(f"{where}: {what}. Names of classes are expected, each once.")
    return given
