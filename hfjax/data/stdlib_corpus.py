"""A corpus that every machine has: the source of Python's own standard library."""

import hashlib
import platform
import sysconfig
from pathlib import Path

from hfjax.data.build_dataset import Recipe, build_from_files
from hfjax.data.token_writer import is_data_set
from hfjax.data.tokenizer import ByteTokenizer, load_tokenizer
from hfjax.utils.write_files import user_cache

# Tests, files outside the library, and code tables.
SKIPPED = {"test", "tests", "idle_test", "lib2to3", "encodings", "__pycache__"}
SKIPPED |= {"site-packages", "dist-packages"}
VALID = 0.05


def standard_library(directory: str | Path | None = None, tokenizer: str | Path = "bytes") -> Path:
    """Return the path of a data set of this Python's standard library, built once.

    Building takes a second with the byte tokenizer. It has two splits, `train` and `valid`.

    Args:
        directory: Where it is built, or was built. None: the user's cache.
        tokenizer: As `hfjax.data.load_tokenizer` takes it.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from hfjax.data import TokenSet, standard_library
        >>> folder = tempfile.TemporaryDirectory()
        >>> place = standard_library(Path(folder.name, "library"))
        >>> len(TokenSet(place / "train")) > len(TokenSet(place / "valid")) > 100_000
        True
    """
    name = f"standard-library-{platform.python_version()}{_tokenizer_suffix(tokenizer)}"
    path = user_cache() / name if directory is None else Path(directory)
    if is_data_set(path):
        return path
    source = f"Python {platform.python_version()} standard library"
    recipe = Recipe((source,), path, str(tokenizer), valid=VALID)
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    try:
        build_from_files(recipe, library_files(Path(sysconfig.get_path("stdlib"))))
    except (FileExistsError, ValueError):  # another process of this run finished first
        if not is_data_set(path):
            raise
    return path


def _tokenizer_suffix(tokenizer: str | Path) -> str:
    """Return the suffix that distinguishes data sets of different tokenizers in the cache."""
    loaded_tokenizer = load_tokenizer(tokenizer)
    if isinstance(loaded_tokenizer, ByteTokenizer):
        return ""
    identity = f"{loaded_tokenizer.end} {loaded_tokenizer.inner.to_str()}"
    return f"-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def library_files(root: Path) -> tuple[Path, ...]:
    """Return the source files below the folder of a standard library, in order."""
    is_kept = lambda path: not SKIPPED & set(path.relative_to(root).parts)
    files = tuple(path for path in sorted(root.rglob("*.py")) if is_kept(path))
    if not files:
        raise ValueError(
            f"{root} has no .py files: this Python comes without its sources. Make a data set of "
            "text of your own: hfjax data … --data-dir DIR"
        )
    return files
