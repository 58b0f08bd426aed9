"""What the table says goes together trains as one device does; what it refuses raises its words.

In a cell two features are turned on by their examples, on as few devices as they need. The same
mathematics on one device is what it has to equal: losses, norms of gradients, parameters, what the
optimizer keeps, statistics.
"""

import itertools
import math
import random
import re
from dataclasses import replace
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.checks.feature_conflicts import (
    CONFLICTS,
    TRACED,
    cell,
    exclusions,
    reasons,
    refusals,
    table,
)
from hfjax.checks.features import (
    FEATURES,
    NOT_ELEMENT_BY_ELEMENT,
    NOT_IN_PARTS,
    Feature,
    needed_features,
    user_text,
)
from hfjax.models.gpt import GPT, MLP, Block, GPTConfig, next_token_loss
from hfjax.models.layers import stack_layers
from hfjax.models.moe import MoE, Router
from tests.small_gpt import OnlyMLP, tokens

CONFIG = GPTConfig.tiny(vocab=64, length=8, layers=2, embed=16, heads=2, dropout=0.1)
BATCH = tokens(rows=16, length=8)
PLAIN = Feature(None, strategy=hfjax.DDP)
PAIRS = list(itertools.combinations(FEATURES, 2))
WRITES, ASYNCHRONOUS = "statistics that a model writes", "asynchronous schedule"
# What one device does otherwise with them; all else is only done otherwise.
MATHEMATICS = {
    "max_grad_norm",
    "precision",
    "loss scale",
    ASYNCHRONOUS,
    "hfjax.optimizers.master_weights",
    "hfjax.optimizers.ema",
    NOT_ELEMENT_BY_ELEMENT,
    "freeze",
    "EXPERT",
    "list of layers",
    WRITES,
}
ROUNDED = {"precision", "loss scale", "hfjax.optimizers.master_weights"}  # to 16 bits
# Cells without an equal on one device, and why.
ALONE = {
    (
        "gradient_accumulation_steps",
        WRITES,
    ): "which rows a microbatch normalises over depends on the mesh"
}


# -- a model that can be all of it --------------------------------------------------------------


class Counting(Block):
    """A layer that keeps the mean of what it returned."""

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(config.embed))

    def __call__(self, stream):
        y = super().__call__(stream)
        self.mean[...] = 0.5 * self.mean[...] + 0.5 * y.mean((0, 1))
        return y


class Mixed(Block):
    """A layer with experts beside its MLP, whose router adds nothing to the loss."""

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        router = Router(balance_loss=0)
        self.moe = MoE(config.embed, 8, experts=2, top_k=1, router=router, rngs=rngs)

    def __call__(self, stream):
        y = super().__call__(stream)
        return y + self.moe(y)[0]


class CountingMixed(Counting, Mixed):
    """A layer with experts that keeps the mean of what it returned."""


LAYERS = {
    frozenset(): Block,
    frozenset({"counting"}): Counting,
    frozenset({"experts"}): Mixed,
    frozenset({"counting", "experts"}): CountingMixed,
    frozenset({"no attention"}): OnlyMLP,
}


class Wider(nnx.Module):
    """A layer with an MLP before it."""

    def __init__(self, layer, config, *, rngs):
        self.before = MLP(config, rngs=rngs)
        self.layer = layer(config, rngs=rngs)

    def __call__(self, stream):
        return self.layer(stream + self.before(stream))


class Small(GPT):
    """A GPT whose layers may be a list of unlike ones, and may write statistics."""

    def __init__(self, model, config, *, rngs):
        super().__init__(config, rngs=rngs)
        counts = "counting" in model
        layer = LAYERS[frozenset({"counting", "experts", "no attention"}) & model]
        if layer is not Block:
            self.layers = stack_layers(config.layers, lambda rngs: layer(config, rngs=rngs), rngs)
        if "listed" in model:
            self.layers = nnx.List([layer(config, rngs=rngs), Wider(layer, config, rngs=rngs)])
        self.normed = nnx.BatchNorm(config.embed, rngs=rngs) if counts else lambda x: x

    def embed(self, batch):
        return self.normed(super().embed(batch))

    def __call__(self, batch):
        if not isinstance(self.layers, nnx.List):
            return super().__call__(batch)
        return self.head(reduce(lambda x, layer: layer(x), self.layers, self.embed(batch)))


@cache
def traced(model: frozenset, layers: int):
    """Small by a key, as one program of JAX: a hundred layouts trace its making once."""
    graphs = []

    @partial(jax.jit, inline=True)
    def arrays(key):
        config = replace(CONFIG, layers=layers)
        graph, state = nnx.split(Small(model, config, rngs=nnx.Rngs(key)))
        graphs.append(graph)
        return state

    def init(rngs):
        state = arrays(rngs.params())
        return nnx.merge(graphs[-1], state)

    return init


# -- a cell -------------------------------------------------------------------------------------


def parts_of(names) -> list[Feature]:
    """The rows of features: first what they need, then their own."""
    needed = [need for name in names for need in needed_features(name)[:-1]]
    return [FEATURES[name] for name in dict.fromkeys([*needed, *names])]


def layout_of(names, sizes=None, freeze=None, optimizer=None, layers=2, words=()):
    parts, words = parts_of(names), frozenset({*words, *(FEATURES[name].model for name in names)})
    sizes = sizes or {axis: n for x in parts for axis, n in x.mesh.items()} or {"data": 2}
    if math.prod(sizes.values()) > len(jax.devices()):  # a grid of four, two levels of four
        del sizes["data"]
    mesh = hfjax.make_mesh(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
    strategy = reduce(lambda a, x: a | x.strategy if x.strategy else a, parts, hfjax.DDP)
    adamw = hfjax.adamw(1e-2, eps=1e-3)
    made = reduce(lambda made, x: x.optimizer(made) if x.optimizer else made, parts, adamw)
    forward = (lambda model, batch: model(batch)) if "called" in words else None
    small = strategy.edit(replicate_below=0)
    layout = hfjax.layout(traced(words, layers), optimizer or made, mesh, small, forward=forward)
    frozen = [freeze] if freeze else [x.freeze for x in parts if x.freeze]
    return layout.freeze(*frozen) if frozen else layout


def step_of(names, sizes=None, own=None, **of_layout):
    """The step of features; `own` are fields of its execution."""
    execution = {key: x for part in parts_of(names) for key, x in part.execution.items()}
    layout = layout_of(names, sizes, **of_layout)
    return hfjax.train_step(layout, next_token_loss, **execution | (own or {}))


Left = dict[tuple, dict[str, np.ndarray]]  # by field: parameters, each of the moments, statistics


def left_by(names, sizes=None, words=()) -> Left:
    """What two steps tell and leave, in the model's own order."""
    step = step_of(names, sizes, words=words)
    state, told = hfjax.init(step.layout, schedule=step.execution.schedule), []
    for _ in range(2):
        state, metrics = step(state, BATCH)
        told.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    losses, norms = np.transpose(told)
    left: Left = {("loss",): {"": losses}, ("grad_norm",): {"": norms}}
    whole = hfjax.to_model_order(step.layout, state)
    for keys, x in jax.tree_util.tree_leaves_with_path(whole):
        if jnp.issubdtype(x.dtype, jnp.number):  # no random key
            field = tuple(key.name for key in keys if isinstance(key, jax.tree_util.GetAttrKey))
            left.setdefault(field, {})[jax.tree_util.keystr(keys)] = hfjax.full_array(x)
    return left


@cache
def on_one_device(names, words) -> Left:
    """What is left where nothing else is turned on; stages that update by themselves stay two."""
    return left_by(names, None if ASYNCHRONOUS in names else {"data": 1}, words)


def norm(arrays) -> float:
    return math.sqrt(sum(float(np.sum(np.square(x, dtype=float))) for x in arrays))


def apart(found: dict, wanted: dict) -> float:
    """How far arrays are apart, relative to the norm of all."""
    assert found.keys() == wanted.keys()
    wide = lambda x: np.asarray(x, float)
    return norm(wide(found[k]) - wide(wanted[k]) for k in wanted) / max(norm(wanted.values()), 1e-9)


def assert_trains(pair, *words: str) -> None:
    found = left_by(pair, words=words)
    if pair in ALONE:
        first, second = found["loss",][""]
        assert second < first - 0.01
        return
    own = [name for name in pair if WRITES in pair and name == NOT_IN_PARTS]
    wanted = on_one_device(tuple(x for x in pair if x in MATHEMATICS or x in own), words)
    assert found.keys() == wanted.keys()
    distances = {field: apart(found[field], wanted[field]) for field in wanted}
    rounding = 5e-2 if ROUNDED & {*pair} else 5e-5
    assert {field: x for field, x in distances.items() if not x < rounding} == {}


def works(one: str, other: str) -> bool:
    """Whether the table says of the examples that they go together."""
    return cell(one, other) in "+?"


def drawn() -> list[tuple[str, str]]:
    """Some of a draw in which every feature but one is once; always the same ones."""
    names, rng = list(FEATURES), random.Random(6)
    found = []
    for one, other in rng.sample(PAIRS, len(PAIRS)):
        if {one, other} <= {*names} and works(one, other):
            found.append((one, other))
            names = [name for name in names if name not in (one, other)]
    return found[12:14]


@pytest.mark.slow
@pytest.mark.parametrize("pair", drawn(), ids=" with ".join)
def test_features_go_together_in_a_model_without_attention_too(pair):
    assert_trains(pair, "no attention")


@pytest.mark.slow
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if works(*pair)], ids=" with ".join)
def test_two_features_that_go_together_train_as_one_device_does(pair):
    assert_trains(pair)


# -- what is refused ----------------------------------------------------------------------------

PIPELINE = {"own": {"schedule": hfjax.Schedule("1f1b", 4)}}
CONDITIONS: dict[tuple[str, str], dict[str, Any]] = {  # where a pair is refused that else works
    ("list of layers", "TENSOR"): PIPELINE,
    ("EXPERT", "list of layers"): PIPELINE,
    ("list of layers", "GRID"): PIPELINE,
    ("list of layers", NOT_ELEMENT_BY_ELEMENT): PIPELINE,
    ("list of layers", "freeze"): PIPELINE | {"freeze": "layers/0/*"},
    (NOT_ELEMENT_BY_ELEMENT, "schedule"): {**{"optimizer": optax.adafactor(1e-2), "layers": 3}},
    ("precision", "TENSOR"): {"own": {"precision": hfjax.Precision(reduce="bfloat16")}},
    ("offload", "schedule that branches"): {},  # the platform
    ("offload", "branches=True"): {},
}


@pytest.mark.parametrize("pair", CONFLICTS, ids=" with ".join)
def test_a_pair_that_is_refused_raises_its_words(pair, monkeypatch):
    refusal = CONFLICTS[pair]
    assert bool(refusal.condition_text) == (pair in CONDITIONS) == (cell(*pair) == "?")
    if refusal.condition_text.startswith("on devices"):
        monkeypatch.setattr("hfjax.checks.feature_conflicts.platform_of", lambda mesh: "gpu")

    words = () if any(FEATURES[name].model for name in pair) else ("no attention",)

    def refuse():
        step = step_of(pair, words=words, **CONDITIONS.get(pair, {}))
        return step.lower(BATCH) if refusal.detected_later == TRACED else step

    with pytest.raises(ValueError, match=re.escape(f": {refusal.why}. {refusal.instead}")):
        refuse()


INHERITED = [pair for pair in PAIRS if cell(*pair) == "-" and not {pair, pair[::-1]} & {*CONFLICTS}]


@pytest.mark.slow
@pytest.mark.parametrize("pair", INHERITED, ids=" with ".join)
def test_what_needs_another_is_refused_with_it(pair):
    """For instance every schedule where there is no pipeline."""
    words = "|".join(re.escape(f": {refusal.why}. ") for refusal in refusals(*pair))
    with pytest.raises(ValueError, match=words):
        step_of(pair).lower(BATCH)


# -- the rows -----------------------------------------------------------------------------------


def test_rows_are_of_features_and_no_pair_is_there_twice():
    assert {name for pair in CONFLICTS for name in pair} <= FEATURES.keys()
    assert not {pair[::-1] for pair in CONFLICTS} & CONFLICTS.keys()


@cache
def plain_step():
    return step_of([])


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_is_seen_where_it_is_used_and_nowhere_else(name):
    if FEATURES[name].user_text is None:
        return
    used, plain = step_of([name]), plain_step()
    assert user_text(name, used.layout, used.execution)
    assert user_text(name, plain.layout, plain.execution) is None


def test_a_model_that_runs_in_one_part_is_called_as_it_is():
    layout = hfjax.layout(
        lambda rngs: nnx.Linear(4, 4, rngs=rngs), optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP
    )
    run = hfjax.Execution()
    assert user_text(NOT_IN_PARTS, layout, run) == "a model in one part"


# -- the page -----------------------------------------------------------------------------------


def test_a_line_has_what_a_feature_does_not_go_with():
    lines = dict(line[2:].split(": ", 1) for line in exclusions().replace("\n  ", " ").splitlines())
    assert list(lines) == list(FEATURES)
    assert lines["unroll"] == "goes with everything."
    assert lines["max_grad_norm"] == "refused with optimizer_in_backward; asynchronous schedule."
    assert lines["freeze"] == (
        "refused with asynchronous schedule. Also in some cases refused with list of layers."
    )


def test_the_page_shows_the_table_its_lines_and_its_reasons():
    page = (Path(__file__).parents[1] / "docs/combinations.md").read_text(encoding="utf-8")
    for text in (table(), exclusions(), reasons()):
        assert f"\n{text}\n" in page
        assert max(map(len, text.splitlines())) <= 100
