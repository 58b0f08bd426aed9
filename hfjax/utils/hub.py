"""Names on the Hugging Face Hub: the commit of a name, its files, and a copy on this disk.

The cache, the token, the offline mode and the endpoint are those of the Hub's own client
(`huggingface_hub`), which is imported here only. A name has one form everywhere, as a flag, in
YAML, in Python and in what a run records: `org/name`, or `org/name@revision` for a branch, a tag or
a commit. No name of the Hub has an @.
"""

import errno
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any, Literal

from hfjax.utils.command_errors import import_optional
from hfjax.utils.progress import show_progress
from hfjax.utils.read_files import MISSING, path_kind
from hfjax.utils.tables import quote

Kind = Literal["model", "dataset"]
PREFIX = "hub:"  # of data sets: a flag of data takes folders, too
PART = r"[A-Za-z0-9_][\w.\-]*"
MODEL_NAME = re.compile(rf"(?P<repo>{PART}/{PART})(@(?P<revision>\S+))?", re.ASCII)
DATASET_NAME = re.compile(
    rf"{PREFIX}(?P<repo>{PART}/{PART})(?P<folder>(/{PART})*)/?(@(?P<revision>\S+))?", re.ASCII
)
COMMIT = re.compile(r"[0-9a-f]{40}")
SHORT = 12  # characters of a commit in a line
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)  # a write names no file


@dataclass(frozen=True)
class HubName:
    """What a name says: a repository of the Hub, perhaps a folder in it, and a revision.

    >>> str(parse_dataset("hub:org/texts/en@v2")), str(parse_model("org/name"))
    ('hub:org/texts/en@v2', 'org/name')
    """

    repo: str
    kind: Kind
    revision: str | None = None
    folder: str = ""

    @property
    def commit(self) -> str | None:
        """The revision, if it is a commit, which never moves."""
        return self.revision if COMMIT.fullmatch(self.revision or "") else None

    @property
    def branch(self) -> str:
        """The name without a revision."""
        folder = f"/{self.folder}" if self.folder else ""
        return f"{PREFIX if self.kind == 'dataset' else ''}{self.repo}{folder}"

    def at(self, commit: str) -> "HubName":
        """Return the name at a commit."""
        return replace(self, revision=commit)

    def __str__(self) -> str:
        return self.branch + (f"@{self.revision}" if self.revision else "")


def parse_model(text: str | Path) -> HubName | None:
    """Return what `org/name[@revision]` names; None if a text has another form.

    >>> parse_model("org/name@v1").revision, parse_model("./org/name"), parse_model("name")
    ('v1', None, None)
    """
    match = MODEL_NAME.fullmatch(str(text))
    return HubName(match["repo"], "model", match["revision"]) if match else None


def parse_dataset(text: str | Path) -> HubName | None:
    """Return what `hub:org/name[/folder][@revision]` names; None without that prefix."""
    if not str(text).startswith(PREFIX):
        return None
    match = DATASET_NAME.fullmatch(str(text))
    if match is None:
        raise ValueError(
            f"{quote(text)}: a data set of the Hub is named hub:ORG/NAME, hub:ORG/NAME/FOLDER for "
            "one folder of it, and with @REVISION for a branch, a tag or a commit."
        )
    return HubName(match["repo"], "dataset", match["revision"], match["folder"].strip("/"))


def is_model_name(text: str | Path) -> bool:
    """Return whether a text names a model on the Hub: a folder of that name here wins.

    A revision says that the Hub is meant: a folder has none.
    """
    name = parse_model(text)
    return name is not None and (path_kind(Path(text)) == MISSING)


# -- the client --------------------------------------------------------------------------------


def resolve(name: HubName) -> str:
    """Return the commit that a name stands for now; without the Hub, as the cache knows it."""
    if name.commit is not None:
        return name.commit
    hub = _client(name)
    with _explain_errors(name), _quiet_if_offline(hub):
        revision = hub.resolve_revision(name.repo, repo_type=name.kind, revision=name.revision)
    return revision.resolved


def list_files(name: HubName) -> list[str]:
    """Return the paths of all files of a name at a commit, in order."""
    hub = _client(name)
    about = {"repo_type": name.kind, "revision": name.revision}
    with _explain_errors(name):
        try:  # a commit's list never changes
            tree = hub.get_cached_repo_tree(name.repo, **about)
        except hub.errors.CachedRepoTreeNotFoundError:
            tree = hub.HfApi().list_repo_tree(name.repo, recursive=True, **about)
        return sorted(entry.path for entry in tree if isinstance(entry, hub.hf_api.RepoFile))


def download(
    name: HubName, patterns: Sequence[str], ignore: Sequence[str] = (), progress: bool = True
) -> Path:
    """Return the folder of a name at a commit in the Hub's cache, with the files of some patterns.

    Files that are there are not read again. A connection that breaks off goes on where it ended.

    Args:
        name: The name with a commit.
        patterns: The files, where `*` stands for any characters; those that are missing are not
            reported.
        ignore: Patterns of files to leave out.
        progress: Whether to show it on standard error.
    """
    hub = _client(name)
    about = {"repo_type": name.kind, "revision": name.revision}
    filters = {"allow_patterns": list(patterns), "ignore_patterns": list(ignore) or None}
    missing = (hub.errors.CachedRepoTreeNotFoundError, hub.errors.LocalEntryNotFoundError)
    with _explain_errors(name):
        with suppress(*missing):  # without its list the client takes a part for the whole
            hub.get_cached_repo_tree(name.repo, **about)
            return Path(hub.snapshot_download(name.repo, local_files_only=True, **about, **filters))
        with _show_download(name, hub, progress):
            return Path(hub.snapshot_download(name.repo, **about, **filters))


@contextmanager
def _quiet_if_offline(hub: Any) -> Iterator[None]:
    """Leave out the client's warning that the Hub cannot be reached, where the user wants that."""
    client = logging.getLogger("huggingface_hub")
    level = client.level
    try:
        if hub.constants.HF_HUB_OFFLINE:
            client.setLevel(logging.ERROR)
        yield
    finally:
        client.setLevel(level)


def exactly(paths: Sequence[str]) -> list[str]:
    """Return patterns of these files and no others."""
    return [escape(path) for path in paths]


@contextmanager
def _show_download(name: HubName, hub: Any, progress: bool) -> Iterator[None]:
    """Show the client's bars on a terminal, and a line now and then in a log."""
    with ExitStack() as stack:
        if not (progress and sys.stderr.isatty()):
            stack.enter_context(hub.utils.disable_progress_bars())
        if progress and not sys.stderr.isatty():
            stack.enter_context(show_progress(f"downloading {name}"))
        yield


def _client(name: HubName) -> Any:
    """Return the library `huggingface_hub`; if it is missing, the error says how to install it."""
    caller = f"{quote(name)}: there is no such folder, and to read it from the Hugging Face Hub"
    if name.kind == "dataset":
        caller = f"{quote(name)}: reading from the Hugging Face Hub"
    hub = import_optional("huggingface_hub", f"{caller} hfjax", "hub")
    for module in ("errors", "hf_api", "utils", "constants"):
        import_optional(f"huggingface_hub.{module}", caller, "hub")
    return hub


# -- errors ------------------------------------------------------------------------------------


@contextmanager
def _explain_errors(name: HubName) -> Iterator[None]:
    """Raise what the client raises as a ValueError that says what to do."""
    try:
        yield
    except Exception as error:
        causes = list(_causes(error))
        if any(_is_of_disk(cause) for cause in causes):
            raise
        subject = name if name.commit is None else name.branch  # found from a branch, mostly
        raise ValueError(f"{quote(subject)}: {_explanation(name, causes)}") from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and what raised it."""
    while error is not None:
        yield error
        error = error.__cause__


def _is_of_disk(error: BaseException) -> bool:
    """Return whether the disk is the reason, and not the connection."""
    return isinstance(error, OSError) and (
        error.errno in DISK_ERRORS or (bool(error.filename) and error.errno is not None)
    )


def _explanation(name: HubName, causes: Sequence[BaseException]) -> str:
    """Return why a name cannot be read, and what to do."""
    hub = _client(name)
    errors, endpoint = hub.errors, hub.constants.ENDPOINT
    kind = "data set" if name.kind == "dataset" else "model"
    page = f"{endpoint}/{'datasets/' * (name.kind == 'dataset')}{name.repo}"
    log_in = "log in (hf auth login, or HF_TOKEN=… in the environment)"
    folder = " There is no folder of that name here either." * (name.kind == "model")
    table = {
        errors.GatedRepoError: (
            f"access is gated. Accept its conditions on {page}, and {log_in} with that account."
        ),
        errors.RepositoryNotFoundError: (
            f"{endpoint} has no {kind} {name.repo}, or it is private.{folder} Check the name; if "
            f"it is private, {log_in}."
        ),
        errors.RevisionNotFoundError: (
            f"it has no revision {name.revision!r}. Give a branch, a tag or a commit of "
            f"{page}/commits, or leave out @{name.revision}."
        ),
        errors.EntryNotFoundError: f"a file is not at {page}: get the list of files there.",
        errors.HFValidationError: f"that is no name of the Hub: {causes[0]}",
    }
    for cause in causes:
        for error_type, text in table.items():
            if isinstance(cause, error_type) and not isinstance(cause, FileNotFoundError):
                return text
    if hub.constants.HF_HUB_OFFLINE:
        return (
            "HF_HUB_OFFLINE is set, and the Hub's cache does not have all of it "
            f"({hub.constants.HF_HUB_CACHE}). Unset it, or download it once where there is a "
            f"network: hf download {name.repo}{' --repo-type dataset' * (kind != 'model')}"
        )
    status = next((s for cause in causes if (s := _http_status(cause))), None)
    if status is not None:
        return _status_explanation(status, endpoint, log_in)
    if any(isinstance(cause, errors.FileMetadataError) for cause in causes):
        return (
            f"{endpoint} does not answer as the Hub does (no commit in its headers). Check "
            "HF_ENDPOINT, and proxies in between."
        )
    reason = next(iter(str(causes[-1]).splitlines()), type(causes[-1]).__name__)
    return (
        f"{endpoint} cannot be reached, or the connection broke off ({quote(reason)}). Check the "
        "network, and start again: files that are complete are not read twice. What is in the "
        "Hub's cache is read without a network by HF_HUB_OFFLINE=1."
    )


def _http_status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _status_explanation(status: int, endpoint: str, log_in: str) -> str:
    """Return what an HTTP status means that says nothing of the repository."""
    if status == 401:
        return f"{endpoint} refuses the token (401). Renew it, and {log_in}."
    if status == 403:
        return (
            f"{endpoint} forbids it with this token (403). Give the token the right to read this "
            f"repository, or {log_in} with another."
        )
    return f"{endpoint} answers with status {status}. Try again later."
