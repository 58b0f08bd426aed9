"""The images of a folder: by classes, or paired with masks; nothing is decoded."""

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hfjax.utils.image_names import is_folder, is_image, is_system_file
from hfjax.utils.read_files import (
    FOLDER,
    MISSING,
    check_ordinary,
    encoding_error,
    path_kind,
    read_text,
)
from hfjax.utils.tables import quote

SPLITS = {"train": ("train",), "valid": ("valid", "val")}
IMAGES, MASKS, CLASSES = "images", "masks", "classes.txt"
TOKENS = "meta.json"  # marks a folder as a token data set
LOSSY = (".jpg", ".jpeg", ".jpe", ".jfif")  # lossy formats corrupt labels
ADVICE = (
    "Put the images of each class into a folder of its own (cat/1.jpg), or images and their masks "
    "into images/ and masks/."
)


@dataclass(frozen=True)
class ImageListing:
    """Images below a folder: sorted relative names, sizes in bytes, and the count of others."""

    names: list[str]
    sizes: list[int]
    num_others: int


def list_images(folder: Path) -> ImageListing:
    """Return the images in a folder and its subfolders, without hidden ones."""
    files: list[tuple[str, int]] = []
    num_others, stack, visited = 0, [(folder, "")], set()
    while stack:
        directory, prefix = stack.pop()
        if (real_path := os.path.realpath(directory)) in visited:
            raise ValueError(
                f"{quote(directory)} leads to a folder that is there already: {quote(real_path)}. "
                "Take the link out."
            )
        visited.add(real_path)
        for entry in _entries(directory):
            name = prefix + entry.name
            if is_folder(entry):
                stack.append((Path(entry.path), f"{name}/"))
            elif is_image(name):
                check_ordinary(Path(entry.path))
                files.append((name, entry.stat().st_size))
            else:
                num_others += 1
    files.sort()
    return ImageListing([name for name, _ in files], [size for _, size in files], num_others)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not is_system_file(entry.name)]


def list_folders(folder: Path) -> list[str]:
    """Return the names of a folder's subfolders, sorted."""
    return sorted(entry.name for entry in _entries(folder) if is_folder(entry))


def count_files(folder: Path) -> tuple[int, int]:
    """Return the number of images and of other files directly in a folder."""
    files = [entry.name for entry in _entries(folder) if not is_folder(entry)]
    images = sum(map(is_image, files))
    return images, len(files) - images


def parts_of(directory: str | Path) -> dict[str, Path]:
    """Return the folders of the splits `train` and `valid` (or `val`) of a folder of images.

    A split has subfolders, of classes or of images and masks: `train/` with images in it is a
    class. The result is empty for a folder that is not split.

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
    folders = {}
    for split, names in SPLITS.items():
        for name in names:
            path = folder / name
            if path.is_dir() and list_folders(path) and not count_files(path)[0]:
                folders.setdefault(split, path)
    return folders


def split_folder(directory: Path, split: str | None) -> Path:
    """Return the folder of a split, or the folder itself if it is not split."""
    _check_folder(directory)
    if split is not None and split not in SPLITS:
        raise ValueError(f"part={split!r}: one of {', '.join(SPLITS)}.")
    splits = parts_of(directory)
    if not splits:
        return directory
    if split is None:
        inside = " and ".join(quote(path) for path in splits.values())
        raise ValueError(
            f"{quote(directory)} holds parts: open {inside}, one at a time, or say part='train'."
        )
    if split not in splits:
        raise ValueError(
            f"{quote(directory)} has no part {split}: it has {', '.join(splits)}. Make a folder "
            f"{split}/ beside it, or give another directory."
        )
    return splits[split]


def _check_folder(directory: Path) -> None:
    """Refuse a path that is no folder, or that is a token data set."""
    if (kind := path_kind(directory)) != FOLDER:
        problem = "no such directory" if kind == MISSING else f"it is {kind}"
        raise ValueError(f"{quote(directory)}: {problem}. A folder of images is expected.")
    candidates = [directory, *(directory / name for names in SPLITS.values() for name in names)]
    if any((path / TOKENS).is_file() for path in candidates):
        raise ValueError(
            f"{quote(directory)} is a data set of tokens, not of images: hfjax.data.TokenSet opens "
            "it. Here a folder of images is expected."
        )


def has_masks(directory: Path) -> bool:
    """Return whether a folder has images and masks, not classes; refuse only one of the two."""
    folders = list_folders(directory)
    if IMAGES in folders and MASKS in folders:
        return True
    for present, missing in ((IMAGES, MASKS), (MASKS, IMAGES)):
        if folders == [present]:
            raise ValueError(
                f"{quote(directory)} has {present}/ and no {missing}/. Give each image a mask of "
                f"the same name ({IMAGES}/1.jpg, {MASKS}/1.png), or name the folder as its class."
            )
    return False


def class_folders(directory: Path) -> list[str]:
    """Return the names of the class folders, sorted; refuse a folder that has none."""
    if folders := list_folders(directory):
        return folders
    images, others = count_files(directory)
    if not images + others:
        raise ValueError(f"{quote(directory)} is empty. {ADVICE}")
    is_inside = directory.name in (IMAGES, MASKS) and directory.with_name(MASKS).is_dir()
    hint = f"Or open {quote(directory.parent)}, which has the masks." if is_inside else ""
    summary = f"images ({images})" if images else f"no image (other files: {others})"
    raise ValueError(
        f"{quote(directory)} has no folders of classes; it holds {summary}. {ADVICE} {hint}"
    )


def match_masks(directory: Path, images: ImageListing, masks: ImageListing) -> list[str]:
    """Return the mask of each image: the file of the same name, whatever its suffix."""
    by_stem = _by_stem(directory / MASKS, masks.names)
    _by_stem(directory / IMAGES, images.names)
    unpaired = [name for name in images.names if _stem(name) not in by_stem]
    if unpaired:
        raise ValueError(
            f"{len(unpaired)} of {len(images.names)} images in {quote(directory / IMAGES)} have no "
            f"mask, the first is {quote(unpaired[0])}: {MASKS}/{quote(_stem(unpaired[0]))}.png is "
            "expected. Add the masks, or move these images away."
        )
    mask_names = [by_stem[_stem(name)] for name in images.names]
    for name in mask_names:
        if name.lower().endswith(LOSSY):
            raise ValueError(
                f"{quote(directory / MASKS / name)}: JPEG changes labels. Write masks as PNG."
            )
    return mask_names


def _by_stem(folder: Path, names: list[str]) -> dict[str, str]:
    duplicates = [stem for stem, times in Counter(map(_stem, names)).items() if times > 1]
    if duplicates:
        same = [name for name in names if _stem(name) == duplicates[0]]
        raise ValueError(
            f"{quote(folder)} has {' and '.join(map(quote, same))}: which one is meant? Keep one."
        )
    return {_stem(name): name for name in names}


def _stem(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(""))


def read_class_names(directory: Path) -> list[str] | None:
    """Return the names in the classes.txt of a folder, or of its parent if it is a split."""
    folders = [directory]
    if any(directory.name in names for names in SPLITS.values()):
        folders.append(directory.parent)
    for folder in folders:
        if os.path.lexists(path := folder / CLASSES):
            lines = [line.strip() for line in _read_text(path).strip().splitlines()]
            return check_class_names(lines, quote(path))
    return None


def _read_text(path: Path) -> str:
    """Return the text of a file, without a byte order mark."""
    try:
        return read_text(path).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"{encoding_error(quote(path), error)}.") from None


def check_class_names(names: Iterable[str], source: str) -> list[str]:
    """Return class names; refuse an empty list, empty names and duplicates."""
    if isinstance(names, str):
        raise ValueError(f"{source}={names!r}: a list of names is expected.")
    class_names = list(names)
    invalid = [name for name in class_names if not isinstance(name, str) or not name]
    invalid += [name for name, times in Counter(class_names).items() if times > 1]
    if invalid or not class_names:
        problem = (
            f"{invalid[0]!r} is empty, no text, or comes twice" if class_names else "there is none"
        )
        raise ValueError(f"{source}: {problem}. Names of classes are expected, each once.")
    return class_names
