"""The model of `--model.pretrained`: its shape, its sequence length, its weights."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

import hfjax
from hfjax.adapters.lora_model import Lora, lora
from hfjax.distributed.consensus import check_same, run_on_all, run_on_first
from hfjax.distributed.exchange import gather_values
from hfjax.models.gpt import GPTConfig
from hfjax.models.moe import MoEConfig
from hfjax.parallel.execution import PipelineSchedule
from hfjax.trainer.config import ModelConfig, TrainConfig
from hfjax.trainer.lora_config import named_as_flags
from hfjax.trainer.model import ROUND_TO, ModelChoice, loss_for
from hfjax.trainer.source_snapshot import is_copy, model_name, read_copy
from hfjax.utils.tables import human, quote
from hfjax.weights.families import parse_config
from hfjax.weights.hub import open_folder
from hfjax.weights.model_folder import TOKENIZER, ModelFolder
from hfjax.weights.pretrained import Pretrained, from_folder

MAX_FINETUNING_RATE = 1e-3  # from this learning rate on, a trained model forgets
DEFAULT_MAX_LENGTH = 4096  # tokens in a sequence, unless a flag sets it


def open_pretrained(opts: ModelConfig, dtype: str = "fp32", pad: int = ROUND_TO) -> Pretrained:
    """Return the model of a folder, of the Hub, or of a run's own copy. All processes call it.

    Args:
        opts: The settings with its folder or name.
        dtype: Dtype of the parameters.
        pad: The vocabulary is padded to a multiple of this.
    """
    source = opts.pretrained or ""
    if run_on_first(lambda: is_copy(Path(source))):
        folder = run_on_all(lambda: read_copy(Path(source)))
    else:
        folder = open_folder(source)
    check_same("folder of the model", {"hash": folder.fingerprint})
    pretrained = from_folder(folder, dtype, pad_vocab_to=pad)
    changes = _config_changes(opts, pretrained.config)
    return (
        replace(pretrained, config=replace(pretrained.config, **changes)) if changes else pretrained
    )


def _config_changes(opts: ModelConfig, config: Any) -> dict[str, Any]:
    """Return the changes that flags make to a model's shape; weights depend on none of them."""
    changes: dict[str, Any] = {}
    if opts.dropout:  # 0 is fine for a model without dropout
        _check_kind(config, GPTConfig, f"dropout {opts.dropout}", "only a GPT has dropout")
        changes["dropout"] = opts.dropout
    if opts.capacity_factor is not None:
        _check_kind(
            config,
            MoEConfig,
            f"capacity-factor {opts.capacity_factor}",
            "this model has no experts",
        )
        changes["capacity"] = opts.capacity_factor or None
    if opts.seq_len is not None and opts.seq_len > config.length:
        if isinstance(config, GPTConfig):
            raise ValueError(
                f"--model.seq-len {opts.seq_len}: {quote(opts.pretrained)} has learned "
                f"{config.length} positions, and has none for what lies beyond. Give at most "
                f"{config.length}."
            )
        changes["length"] = opts.seq_len
    return changes


def _check_kind(config: Any, kind: type, flag: str, why: str) -> None:
    if not isinstance(config, kind):
        raise ValueError(f"--model.{flag}: {why}. Leave it out.")


def model_choice(config: TrainConfig, model: Pretrained) -> ModelChoice:
    """Return a folder's model as one to train.

    Args:
        config: The configuration.
        model: The model of the folder.
    """
    shape = model.config
    length = config.model.seq_len or min(shape.length, DEFAULT_MAX_LENGTH)
    name, loss = model_name(model.folder), loss_for(config.model)
    return ModelChoice(
        name, make_init(config, model), loss, shape.vocab, length, shape.length, shape
    )


def make_init(config: TrainConfig, model: Pretrained) -> Callable:
    """Return the function that makes the model, with adapters if the configuration has them."""
    if config.lora.rank is None:
        return model.create
    with named_as_flags():
        return lora(model, **config.lora.options)


def length_note(model: Pretrained, length: int) -> str:
    """Return the message about the sequence length."""
    trained = parse_config(model.folder.config).length
    if length > trained:
        return (
            f"warning: sequences of {length} tokens are longer than those that the model was "
            f"trained for ({trained}): what it does beyond is for this training to teach"
        )
    more = f"; the model takes {trained}: --model.seq-len" * (length < trained)
    return f"sequences of {length} tokens{more}"


def rate_warning(rate: float) -> str:
    """Return the warning about a learning rate at which a model forgets what it knows."""
    return (
        f"warning: a learning rate of {rate:g} is for models that begin from nothing; trained ones "
        "are trained on with about 1e-5: --optimizer.learning-rate"
    )


def missing_tokenizer(folder: ModelFolder) -> str:
    """Return the message about a folder without a tokenizer where text has to be read."""
    return (
        f"--model.pretrained {folder.source}: it has no {TOKENIZER}, and no tokens are named: text "
        "cannot be read. Put it there (transformers' AutoTokenizer writes it: "
        "tokenizer.save_pretrained(folder)), or give tokens: --data.train DIR."
    )


def init_from_folder(
    model: Pretrained, layout: hfjax.Layout, seed: int, schedule: PipelineSchedule | None
) -> tuple[hfjax.State, str]:
    """Return an initial state with a folder's weights, and a message about reading them."""
    source = model.folder.source
    if is_copy(model.folder.path):
        raise ValueError(
            f"--model.pretrained {source}: it is what a run keeps of its model, and has no "
            "weights. Give the folder of a model: that of the run, if it is still there, or the "
            "run's own model (hfjax export RUN --export-dir FOLDER). To begin with the run's "
            "parameters alone: --checkpoint.init-from RUN beside it."
        )
    adapted, began = layout.template.model_init, time.monotonic()
    weights: Any = adapted.weights if isinstance(adapted, Lora) else model.weights
    state = hfjax.init(layout, seed, schedule, parameters=weights)
    seconds = time.monotonic() - began
    dtypes = sorted({str(p.dtype) for p in layout.param_specs.values()})
    return state, (
        f"read {byte_counts(weights.read)} of {source} in {seconds:.1f} s; parameters are stored "
        f"in {' and '.join(dtypes)}"
    )


def byte_counts(nbytes: int) -> str:
    """Return how many bytes each process has read or written."""
    count = jax.process_count()
    if count == 1:
        return human(nbytes)
    read = gather_values(range(count), nbytes)
    return ", ".join(f"{human(n)} (process {process})" for process, n in read.items())
