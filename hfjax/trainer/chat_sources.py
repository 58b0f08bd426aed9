"""Files of conversations in a configuration: each becomes a folder of tokens, in hfjax's cache."""

import hashlib
import json
from pathlib import Path
from typing import Any

from hfjax.data.chat.build_chats import ChatOptions, build_chats
from hfjax.data.chat.conversations import is_chat_file
from hfjax.data.chat.template import Template, load_template
from hfjax.data.examples import fit_documents
from hfjax.data.token_dataset import META, SPLITS, Meta, TokenSet
from hfjax.data.token_writer import is_data_set
from hfjax.distributed.consensus import run_on_all
from hfjax.trainer.config import DataConfig
from hfjax.trainer.hub_sources import lock_file
from hfjax.utils.read_files import CHUNK, ORDINARY, path_kind
from hfjax.utils.tables import quote
from hfjax.utils.write_files import user_cache
from hfjax.weights.pretrained import Pretrained

FORMAT = 1  # of prepared folders: another number makes them anew


def chat_files(config: DataConfig) -> list[str]:
    """Return the names of files of conversations, to train and to validate on."""
    names = dict.fromkeys((*config.train, *([config.valid] if config.valid else ())))
    return [name for name in names if is_chat_file(name)]


def reads_chats(config: DataConfig) -> bool:
    """Return whether a run trains or validates on conversations, also on a folder of them."""
    folders = (Path(name) for name in (*config.train, config.valid or "") if name)
    paths = (path for folder in folders for path in (folder, folder / SPLITS[0]))
    data_sets = (path for path in paths if path_kind(path / META) == ORDINARY)
    return bool(chat_files(config)) or any(Meta.load(path).is_counted for path in data_sets)


def prepare_chats(file: str, model: Pretrained, config: DataConfig) -> Path:
    """Return the folder of tokens of a file of conversations. All processes call it.

    It lies in hfjax's cache, by the bytes of the file, tokenizer, template and settings. On each
    machine the first process that comes makes it; the others wait and read it.

    Args:
        file: The file.
        model: The model, whose tokenizer and template are used.
        config: The settings.
    """
    return run_on_all(lambda: _prepare(Path(file), model, config))


def _prepare(file: Path, model: Pretrained, config: DataConfig) -> Path:
    if (kind := path_kind(file)) != ORDINARY:
        raise ValueError(f"--data.train {quote(file)}: it is {kind}. Give a file of conversations.")
    template = load_template(model.folder.path, config.template)
    options = ChatOptions(config.turns, config.date)
    path = user_cache() / "chats" / _folder_name(file, model.tokenizer, template, options)
    if is_data_set(path):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(path.with_name(f".{path.name}.lock")):
        if not is_data_set(path):
            build_chats(file, path, model.tokenizer, template, options)
    return path


def _folder_name(file: Path, tokenizer: Any, template: Template, options: ChatOptions) -> str:
    """Return a folder's name, which differs with whatever the tokens depend on."""
    identity = f"{tokenizer.end} {tokenizer.inner.to_str()}"
    tokens = sorted(template.tokens.items())
    settings = [_hash(file), identity, template.text, tokens, options.turns, options.today, FORMAT]
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    return f"{file.name.partition('.')[0] or 'chats'}-{digest}"


def _hash(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def chat_line(name: str, data: TokenSet, length: int, long: str) -> str:
    """Return the line about a data set of conversations: what is counted, and what is left out.

    Args:
        name: The name of the data set.
        data: The data set.
        length: The number of targets in a sequence.
        long: What becomes of longer ones.
    """
    fitted = fit_documents(data, length, long)
    counted = int(data.read_counted(0, len(data)).sum(dtype=int))
    text = (
        f"{quote(name)}: {data.meta.documents:,} chats of {len(data):,} tokens, of which the loss "
        f"counts {counted:,}"
    )
    if fitted.num_long:
        done = "cut" if long == "cut" else "left out"
        text += f"; {fitted.num_long:,} longer than {length + 1} tokens are {done} (--data.long)"
    if fitted.num_uncounted:
        text += f"; {fitted.num_uncounted:,} left out, since nothing that counts remains of them"
    return text
