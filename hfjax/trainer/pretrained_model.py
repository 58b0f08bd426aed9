"""The model of `--model.pretrained`: its shape, the length of its rows, its weights."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

import hfjax
from hfjax.distributed.consensus import check_same, in_all
from hfjax.distributed.exchange import exchanged
from hfjax.models.gpt import GPTConfig
from hfjax.models.moe import MoEConfig
from hfjax.parallel.execution import PipelineSchedule
from hfjax.trainer.config import Model, Train
from hfjax.trainer.model import ROUND_TO, ModelChoice, loss_of
from hfjax.trainer.source_snapshot import is_copy, name_of_model, read_copy
from hfjax.utils.tables import human, named
from hfjax.weights.families import config_of
from hfjax.weights.model_folder import TOKENIZER, read_folder
from hfjax.weights.pretrained import Pretrained, of_folder

FROM_NOTHING = 1e-3  # from this learning rate on a trained model forgets
LONGEST = 4096  # tokens of a row, where no flag says how many


def model_of(given: Model, pad: int = ROUND_TO) -> Pretrained:
    """Return the model of a folder, or of a run's own copy of one. All processes call it.

    Args:
        given: What says of which folder, and how it is stored.
        pad: The embedding has a multiple of so many rows.
    """
    path = Path(given.pretrained or "")
    folder = in_all(lambda: read_copy(path) if is_copy(path) else read_folder(path))
    check_same("folder of the model", {"hash": folder.fingerprint})
    found = of_folder(folder, given.stored, pad_vocab_to=pad)
    changes = _changes(given, found.config)
    return replace(found, config=replace(found.config, **changes)) if changes else found


def _changes(given: Model, config: Any) -> dict[str, Any]:
    """Return what flags change of a model's shape: nothing that the weights depend on."""
    changes: dict[str, Any] = {}
    if given.dropout:  # a model that has none drops nothing
        _only(config, GPTConfig, f"dropout {given.dropout}", "only a GPT has dropout")
        changes["dropout"] = given.dropout
    if given.capacity is not None:
        _only(config, MoEConfig, f"capacity {given.capacity}", "this model has no experts")
        changes["capacity"] = given.capacity or None
    if given.length is not None and given.length > config.length:
        if isinstance(config, GPTConfig):
            raise ValueError(
                f"--model.length {given.length}: {named(given.pretrained)} has learned "
                f"{config.length} positions, and has none for what lies beyond. Give at most "
                f"{config.length}."
            )
        changes["length"] = given.length
    return changes


def _only(config: Any, kind: type, flag: str, why: str) -> None:
    if not isinstance(config, kind):
        raise ValueError(f"--model.{flag}: {why}. Leave it out.")


def choice_of(config: Train, model: Pretrained) -> ModelChoice:
    """Return a folder's model as one to train.

    Args:
        config: The configuration.
        model: That of the folder.
    """
    shape = model.config
    length = config.model.length or min(shape.length, LONGEST)
    name, loss = name_of_model(model.folder), loss_of(config.model)
    return ModelChoice(name, model.create, loss, shape.vocab, length, shape.length, shape)


def told_of_rows(model: Pretrained, length: int) -> str:
    """Return what to say of the length of rows."""
    trained = config_of(model.folder.config).length
    if length > trained:
        return (
            f"warning: rows of {length} tokens are longer than those that the model was trained "
            f"for ({trained}): what it does beyond is for this training to teach"
        )
    more = f"; the model takes {trained}: --model.length" * (length < trained)
    return f"rows of {length} tokens{more}"


def told_of_rate(rate: float) -> str:
    """Return what to say of a rate by which a model forgets what it knows."""
    return (
        f"warning: a learning rate of {rate:g} is for models that begin from nothing; trained ones "
        "are trained on with about 1e-5: --optimizer.rate"
    )


def without_tokenizer(folder: Path) -> str:
    """Return what to say of a folder where text has to be read."""
    return (
        f"--model.pretrained {named(folder)}: it has no {TOKENIZER}, and no data is named: text "
        "cannot be read. Put it there (transformers' AutoTokenizer writes it: "
        "tokenizer.save_pretrained(folder)), or give tokens: --data.train DIR."
    )


def begun_with(
    model: Pretrained, layout: hfjax.Layout, seed: int, schedule: PipelineSchedule | None
) -> tuple[hfjax.State, str]:
    """Return the state that begins with a folder's weights, and what to say of their reading."""
    path = named(model.folder.path)
    if is_copy(model.folder.path):
        raise ValueError(
            f"--model.pretrained {path}: it is what a run keeps of its model, and has no weights. "
            "Give the folder of a model: that of the run, if it is still there, or the run's own "
            "model (hfjax export RUN --out FOLDER). To begin with the run's parameters alone: "
            "--checkpoints.start RUN beside it."
        )
    weights, began = model.weights, time.monotonic()
    state = hfjax.init(layout, seed, schedule, parameters=weights)
    seconds = time.monotonic() - began
    kinds = sorted({str(p.dtype) for p in layout.placed.values()})
    return state, (
        f"read {by_process(weights.read)} of {path} in {seconds:.1f} s; parameters are stored in "
        f"{' and '.join(kinds)}"
    )


def by_process(mine: int) -> str:
    """Return how many bytes each process has read or written."""
    count = jax.process_count()
    if count == 1:
        return human(mine)
    read = exchanged(range(count), mine)
    return ", ".join(f"{human(n)} (process {process})" for process, n in read.items())
