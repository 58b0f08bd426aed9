"""The model of a configuration: a preset, or one's own; `pretrained_model` has those of folders."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hfjax.models import gpt, llama, moe
from hfjax.models.vision import preset_table
from hfjax.trainer.config import Model, Train
from hfjax.trainer.config_io import function
from hfjax.utils.keywords import nearest_of
from hfjax.utils.mean import check_loss
from hfjax.utils.tables import named

ROUND_TO = 128  # a vocabulary that divides over the devices, and fits their matmuls
SHAPE = ("length", "layers", "heads", "embed")
OF_LLAMAS = ("kv_heads", "mlp", "head")
OF_EXPERTS = ("experts", "top_k", "capacity")


@dataclass(frozen=True)
class ModelChoice:
    """A model to train, and what is known of it."""

    name: str
    init: Callable
    loss: Callable
    vocab: int
    length: int  # of the rows
    most: int | None = None  # the longest row that the model takes, if it has a limit
    shape: Any = None  # the configuration of a preset, or of a folder's model

    @property
    def own_loss(self) -> bool:
        """Whether the loss is none of hfjax's."""
        return self.loss not in (gpt.next_token_loss, moe.next_token_loss)


def choose(config: Train, vocab: int) -> ModelChoice:
    """Return the model of a configuration for a vocabulary."""
    given, loss = config.model, loss_of(config.model)
    if given.own is not None:
        return _own(config, vocab, loss)
    check_preset(given)
    model, name = presets()[given.preset]
    changes = _said(given, SHAPE)
    of_experts = _of_experts(given, model)
    if model is gpt.GPT:
        _check_no_llama(given)
        changes |= {} if given.dropout is None else {"dropout": given.dropout}
        changes["pad_vocab_to"] = ROUND_TO
        shape: Any = gpt.GPTConfig.preset(name, vocab=vocab, **changes)
    else:
        if given.dropout:
            raise ValueError(f"--model.dropout {given.dropout}: a Llama has no dropout.")
        presets_of = moe if model is moe.MoELlama else llama
        changes |= _heads_of_keys(presets_of.PRESETS[name], changes) | _said(given, OF_LLAMAS)
        changes["vocab"] = math.ceil(vocab / ROUND_TO) * ROUND_TO
        shape = replace(presets_of.PRESETS[name], **changes, **of_experts)
    init = lambda rngs: model(shape, rngs=rngs)
    return ModelChoice(given.preset, init, loss, shape.vocab, shape.length, shape.length, shape)


def check_preset(given: Model) -> None:
    """Refuse a preset that is none, of text or images, unless another model takes its place."""
    known = [*presets(), *preset_table.PRESETS]
    if given.own is None and given.pretrained is None and given.preset not in known:
        raise ValueError(
            f"--model.preset {named(given.preset)}: one of {', '.join(known)}."
            f"{nearest_of(given.preset, known)}"
        )


def loss_of(given: Model) -> Callable:
    """Return the loss of a configuration's model: that of the next token, or one's own."""
    return own_loss_of(given) or moe.next_token_loss


def own_loss_of(given: Model) -> Callable | None:
    """Return one's own loss, if the configuration names one."""
    if given.loss is None:
        return None
    loss = function(given.loss, "--model.loss")
    check_loss(loss, f"--model.loss {given.loss}")
    return loss


def presets() -> dict[str, tuple[Any, str]]:
    """Return the names of all presets, with the model and the name that it knows them by."""
    of_llama = {"llama-tiny" if name == "tiny" else name: name for name in llama.PRESETS}
    return {
        **{f"gpt-{name}": (gpt.GPT, name) for name in gpt.PRESETS},
        **{name: (llama.Llama, own) for name, own in of_llama.items()},
        **{name: (moe.MoELlama, name) for name in moe.PRESETS},
    }


def _said(given: Model, names: Sequence[str]) -> dict[str, Any]:
    """Return the settings of these names that are given."""
    return {name: getattr(given, name) for name in names if getattr(given, name) is not None}


def _check_no_llama(given: Model) -> None:
    """Refuse what only a Llama has."""
    if said := _said(given, OF_LLAMAS):
        flag = next(iter(said)).replace("_", "-")
        llamas = [name for name, (model, _) in presets().items() if model is not gpt.GPT]
        raise ValueError(
            f"--model.{flag}: {given.preset} is a GPT, which has no such width: its MLP is four "
            f"times as wide as it is, its heads are embed / heads. These take it: "
            f"{', '.join(llamas)}."
        )


def _of_experts(given: Any, model: Any) -> dict[str, Any]:
    """Return what is said of experts; refuse it of a model that has none."""
    said = _said(given, OF_EXPERTS)
    if said and model is not moe.MoELlama:
        flag = next(iter(said)).replace("_", "-")
        raise ValueError(
            f"--model.{flag}: {given.preset} has no experts. These have: {', '.join(moe.PRESETS)}."
        )
    return said | ({"capacity": said["capacity"] or None} if "capacity" in said else {})


def _heads_of_keys(was: llama.LlamaConfig, changes: dict[str, Any]) -> dict[str, int]:
    """Return how many heads of keys a Llama has whose number of heads is changed."""
    heads = changes.get("heads", was.heads)
    return {"kv_heads": max(heads * was.kv_heads // was.heads, 1)}


def _own(config: Train, vocab: int, loss: Callable) -> ModelChoice:
    name, length = str(config.model.own), config.model.length or 128
    of_presets = (*SHAPE[1:], *OF_LLAMAS, "dropout", *OF_EXPERTS)
    given = list(_said(config.model, of_presets))
    if given:
        flag = given[0].replace("_", "-")
        raise ValueError(
            f"--model.{flag} is of presets, and --model.own {name} is none: say it there."
        )
    make = function(name, "--model.own")
    if len(inspect.signature(make).parameters) != 2:
        raise ValueError(
            f"--model.own {name}: a function of (vocab, length) is expected, which returns "
            f"model_init(rngs); found {inspect.signature(make)}."
        )
    return ModelChoice(name, make(vocab, length), loss, vocab, length)
