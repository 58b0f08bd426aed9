"""Recognize images by their names, and folders that hold any; nothing is decoded."""

import os
from collections import deque
from pathlib import Path

IMAGE_SUFFIXES = (
    *(".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm"),
    *(".tif", ".tiff", ".webp"),
)
SYSTEM_NAMES = ("thumbs.db", "desktop.ini", "__macosx")  # files that operating systems leave behind
MAX_FOLDERS, MAX_ENTRIES = 200, 100  # searched folders, and names in each


def is_image(name: str) -> bool:
    """Return whether a file has the name of an image.

    >>> is_image("cat/1.JPG"), is_image("classes.txt")
    (True, False)
    """
    return name.lower().endswith(IMAGE_SUFFIXES)


def is_system_file(name: str) -> bool:
    """Return whether a file or folder is hidden, or left behind by an operating system.

    >>> is_system_file(".DS_Store"), is_system_file("Thumbs.db"), is_system_file("cat")
    (True, True, False)
    """
    return name.startswith(".") or name.lower() in SYSTEM_NAMES


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder; a broken or circular link is not."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def contains_images(folder: Path) -> bool:
    """Return whether a folder or its subfolders hold images; large ones are sampled.

    >>> contains_images(Path("/nowhere"))
    False
    """
    queue, num_searched = deque([folder]), 0
    while queue and num_searched < MAX_FOLDERS:
        entries, num_searched = _first_entries(queue.popleft()), num_searched + 1
        folders = [Path(entry.path) for entry in entries if is_folder(entry)]
        if any(is_image(entry.name) and os.path.isfile(entry.path) for entry in entries):
            return True
        queue.extend(folders)
    return False


def _first_entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            pairs = zip(range(MAX_ENTRIES), entries, strict=False)
            return [entry for _, entry in pairs if not is_system_file(entry.name)]
    except OSError:
        return []
