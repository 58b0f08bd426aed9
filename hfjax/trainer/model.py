"""The model of a configuration: a preset or the user's; `pretrained_model` has those of folders."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hfjax.models import gpt, llama, moe
from hfjax.models.vision import preset_table
from hfjax.trainer.config import Model, Train
from hfjax.trainer.config_io import load_function
from hfjax.utils.keywords import name_hint
from hfjax.utils.mean import check_loss_signature
from hfjax.utils.tables import quote

ROUND_TO = 128  # pads the vocabulary so that it shards evenly, and fits matmuls
SHAPE_OPTS = ("length", "layers", "heads", "embed")
LLAMA_OPTS = ("kv_heads", "mlp", "head")
EXPERT_OPTS = ("experts", "top_k", "capacity")


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


def choose_model(config: Train, vocab: int) -> ModelChoice:
    """Return the model of a configuration for a vocabulary."""
    opts, loss = config.model, loss_for(config.model)
    if opts.own is not None:
        return _user_model(config, vocab, loss)
    check_preset(opts)
    model, name = presets()[opts.preset]
    changes = _explicit_opts(opts, SHAPE_OPTS)
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
        changes |= _kv_heads(presets_of.PRESETS[name], changes) | _explicit_opts(opts, LLAMA_OPTS)
        changes["vocab"] = math.ceil(vocab / ROUND_TO) * ROUND_TO
        shape = replace(presets_of.PRESETS[name], **changes, **expert_opts)
    init = lambda rngs: model(shape, rngs=rngs)
    return ModelChoice(opts.preset, init, loss, shape.vocab, shape.length, shape.length, shape)


def check_preset(opts: Model) -> None:
    """Refuse an unknown preset, of text or images, unless another model takes its place."""
    known = [*presets(), *preset_table.PRESETS]
    if opts.own is None and opts.pretrained is None and opts.preset not in known:
        raise ValueError(
            f"--model.preset {quote(opts.preset)}: one of {', '.join(known)}."
            f"{name_hint(opts.preset, known)}"
        )


def loss_for(opts: Model) -> Callable:
    """Return the loss of a configuration's model: next-token, or the user's own."""
    return load_loss(opts) or moe.next_token_loss


def load_loss(opts: Model) -> Callable | None:
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


def _explicit_opts(opts: Model, names: Sequence[str]) -> dict[str, Any]:
    """Return those of the named settings that are set."""
    return {name: getattr(opts, name) for name in names if getattr(opts, name) is not None}


def _check_no_llama(opts: Model) -> None:
    """Refuse settings that only a Llama has."""
    if llama_opts := _explicit_opts(opts, LLAMA_OPTS):
        flag = next(iter(llama_opts)).replace("_", "-")
        llamas = [name for name, (model, _) in presets().items() if model is not gpt.GPT]
        raise ValueError(
            f"--model.{flag}: {opts.preset} is a GPT, which has no such width: its MLP is four "
            f"times as wide as it is, its heads are embed / heads. These take it: "
            f"{', '.join(llamas)}."
        )


def _expert_opts(opts: Any, model: Any) -> dict[str, Any]:
    """Return the settings of experts; refuse them for a model that has none."""
    expert_opts = _explicit_opts(opts, EXPERT_OPTS)
    if expert_opts and model is not moe.MoELlama:
        flag = next(iter(expert_opts)).replace("_", "-")
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


def _user_model(config: Train, vocab: int, loss: Callable) -> ModelChoice:
    name, length = str(config.model.own), config.model.length or 128
    preset_opts = (*SHAPE_OPTS[1:], *LLAMA_OPTS, "dropout", *EXPERT_OPTS)
    explicit = list(_explicit_opts(config.model, preset_opts))
    if explicit:
        flag = explicit[0].replace("_", "-")
        raise ValueError(
            f"--model.{flag} is of presets, and --model.own {name} is none: say it there."
        )
    make = load_function(name, "--model.own")
    if len(inspect.signature(make).parameters) != 2:
        raise ValueError(
            f"--model.own {name}: a function of (vocab, length) is expected, which returns "
            f"model_init(rngs); found {inspect.signature(make)}."
        )
    return ModelChoice(name, make(vocab, length), loss, vocab, length)
