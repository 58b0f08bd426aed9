"""Which names are those of images, and whether a folder holds any; nothing is decoded."""

import os
from collections import deque
from pathlib import Path

IMAGES = (
    *(".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm"),
    *(".tif", ".tiff", ".webp"),
)
LITTER = ("thumbs.db", "desktop.ini", "__macosx")  # what systems leave behind
FOLDERS, ENTRIES = 200, 100  # so many folders are looked into, and so many names in each


def is_image(name: str) -> bool:
    """Return whether a file is called as images are.

    >>> is_image("cat/1.JPG"), is_image("classes.txt")
    (True, False)
    """
    return name.lower().endswith(IMAGES)


def is_litter(name: str) -> bool:
    """Return whether a file or folder is hidden, or something that a system left behind.

    >>> is_litter(".DS_Store"), is_litter("Thumbs.db"), is_litter("cat")
    (True, True, False)
    """
    return name.startswith(".") or name.lower() in LITTER


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder; a link that leads nowhere, or to itself, is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def holds_images(folder: Path) -> bool:
    """Return whether images lie in a folder or in folders of it; large ones are sampled.

    >>> holds_images(Path("/nowhere"))
    False
    """
    waiting, looked = deque([folder]), 0
    while waiting and looked < FOLDERS:
        inside, looked = _beginning(waiting.popleft()), looked + 1
        folders = [Path(entry.path) for entry in inside if is_folder(entry)]
        if any(is_image(entry.name) and os.path.isfile(entry.path) for entry in inside):
            return True
        waiting.extend(folders)
    return False


def _beginning(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            pairs = zip(range(ENTRIES), entries, strict=False)
            return [entry for _, entry in pairs if not is_litter(entry.name)]
    except OSError:
        return []
