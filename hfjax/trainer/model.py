"""The model of a configuration: a preset or the user's; `pretrained_model` has those of folders."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hfjax.models import gpt, llama, moe
from hfjax.models.vision import preset_table
from hfjax.trainer.config import ModelConfig, TrainConfig
from hfjax.trainer.config_io import load_function
from hfjax.utils.keywords import name_hint
from hfjax.utils.mean import check_loss_signature
from hfjax.utils.tables import quote

ROUND_TO = 128  # pads the vocabulary so that it shards evenly, and fits matmuls
# Field of a configuration -> that of a preset.
SHAPE_OPTS = {
    "seq_len": "length",
    "num_layers": "layers",
    "num_heads": "heads",
    "hidden_size": "embed",
}
LLAMA_OPTS = {"num_kv_heads": "kv_heads", "intermediate_size": "mlp", "head_dim": "head"}
EXPERT_OPTS = {"num_experts": "experts", "top_k": "top_k", "capacity_factor": "capacity"}


@dataclass(frozen=True)
class ModelChoice:
    """A model to train, with its loss and sizes."""

    name: str
    init: Callable
    loss: Callable
    vocab: int
    length: int  # of the sequences
    max_length: int | None = None  # the longest sequence that the model takes, if limited
    shape: Any = None  # the configuration of a preset, or of a folder's model

    @property
    def has_user_loss(self) -> bool:
        """Whether the loss is the user's own."""
        return self.loss not in (gpt.next_token_loss, moe.next_token_loss)


def choose_model(config: TrainConfig, vocab: int) -> ModelChoice:
    """Return the model of a configuration for a vocabulary."""
    opts, loss = config.model, loss_for(config.model)
    if opts.factory is not None:
        return _user_model(config, vocab, loss)
    check_preset(opts)
    model, name = presets()[opts.preset]
    changes = _preset_fields(opts, SHAPE_OPTS)
    expert_opts = _expert_opts(opts, model)
    if model is gpt.GPT:
        _check_no_llama(opts)
        changes |= {} if opts.dropout is None else {"dropout": opts.dropout}
        changes["pad_vocab_to"] = ROUND_TO
        shape: Any = gpt.GPTConfig.preset(name, vocab=vocab, **changes)
    else:
        if opts.dropout:
            raise ValueError(f"--model.dropout {opts.dropout}: a Llama has no dropout.")
        presets_of = moe if model is moe.MoELlama else llama
        changes |= _kv_heads(presets_of.PRESETS[name], changes) | _preset_fields(opts, LLAMA_OPTS)
        changes["vocab"] = math.ceil(vocab / ROUND_TO) * ROUND_TO
        shape = replace(presets_of.PRESETS[name], **changes, **expert_opts)
    init = lambda rngs: model(shape, rngs=rngs)
    return ModelChoice(opts.preset, init, loss, shape.vocab, shape.length, shape.length, shape)


def check_preset(opts: ModelConfig) -> None:
    """Refuse an unknown preset, of text or images, unless another model takes its place."""
    known = [*presets(), *preset_table.PRESETS]
    if opts.factory is None and opts.pretrained is None and opts.preset not in known:
        raise ValueError(
            f"--model.preset {quote(opts.preset)}: one of {', '.join(known)}."
            f"{name_hint(opts.preset, known)}"
        )


def loss_for(opts: ModelConfig) -> Callable:
    """Return the loss of a configuration's model: next-token, or the user's own."""
    return load_loss(opts) or moe.next_token_loss


def load_loss(opts: ModelConfig) -> Callable | None:
    """Return the user's own loss, if the configuration names one."""
    if opts.loss is None:
        return None
    loss = load_function(opts.loss, "--model.loss")
    check_loss_signature(loss, f"--model.loss {opts.loss}")
    return loss


def presets() -> dict[str, tuple[Any, str]]:
    """Return all presets by name, each as (model class, the class's name for it)."""
    of_llama = {"llama-tiny" if name == "tiny" else name: name for name in llama.PRESETS}
    return {
        **{f"gpt-{name}": (gpt.GPT, name) for name in gpt.PRESETS},
        **{name: (llama.Llama, own) for name, own in of_llama.items()},
        **{name: (moe.MoELlama, name) for name in moe.PRESETS},
    }


def _explicit_opts(opts: ModelConfig, names: Iterable[str]) -> dict[str, Any]:
    """Return those of the named settings that are set."""
    return {name: getattr(opts, name) for name in names if getattr(opts, name) is not None}


def _preset_fields(opts: ModelConfig, fields: Mapping[str, str]) -> dict[str, Any]:
    """Return those of the settings that are set, by a preset's names for them."""
    return {fields[name]: value for name, value in _explicit_opts(opts, fields).items()}


def _check_no_llama(opts: ModelConfig) -> None:
    """Refuse settings that only a Llama has."""
    if llama_opts := _explicit_opts(opts, LLAMA_OPTS):
        flag = next(iter(llama_opts)).replace("_", "-")
        llamas = [name for name, (model, _) in presets().items() if model is not gpt.GPT]
        raise ValueError(
            f"--model.{flag}: {opts.preset} is a GPT, which has no such width: its MLP is four "
            f"times as wide as it is, its heads are hidden size / heads. These take it: "
            f"{', '.join(llamas)}."
        )


def _expert_opts(opts: Any, model: Any) -> dict[str, Any]:
    """Return the settings of experts; refuse them for a model that has none."""
    expert_opts = _preset_fields(opts, EXPERT_OPTS)
    if expert_opts and model is not moe.MoELlama:
        flag = next(iter(_explicit_opts(opts, EXPERT_OPTS))).replace("_", "-")
        raise ValueError(
            f"--model.{flag}: {opts.preset} has no experts. These have: {', '.join(moe.PRESETS)}."
        )
    return expert_opts | (
        {"capacity": expert_opts["capacity"] or None} if "capacity" in expert_opts else {}
    )


def _kv_heads(preset: llama.LlamaConfig, changes: dict[str, Any]) -> dict[str, int]:
    """Return the key-value heads of a Llama whose number of heads is changed."""
    heads = changes.get("heads", preset.heads)
    return {"kv_heads": max(heads * preset.kv_heads // preset.heads, 1)}


def _user_model(config: TrainConfig, vocab: int, loss: Callable) -> ModelChoice:
    name, length = str(config.model.factory), config.model.seq_len or 128
    preset_opts = (*SHAPE_OPTS, *LLAMA_OPTS, "dropout", *EXPERT_OPTS)
    explicit = [n for n in _explicit_opts(config.model, preset_opts) if n != "seq_len"]
    if explicit:
        flag = explicit[0].replace("_", "-")
        raise ValueError(
            f"--model.{flag} is of presets, and --model.factory {name} is none: say it there."
        )
    make = load_function(name, "--model.factory")
    if len(inspect.signature(make).parameters) != 2:
        raise ValueError(
            f"--model.factory {name}: a function of (vocab, seq_len) is expected, which returns "
            f"model_init(rngs); found {inspect.signature(make)}."
        )
    return ModelChoice(name, make(vocab, length), loss, vocab, length)
