"""Precision by path: each parameter is computed with, gathered and reduced in a type of its own."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax import DDP, FSDP, PIPE, ZERO1, PrecisionByPath, Schedule
from hfjax.models import moe
from hfjax.models.gpt import next_token_loss
from hfjax.models.moe import MoELlama
from hfjax.parallel.precision.by_path import parse_precision
from hfjax.utils.paths import flatten
from tests.small_gpt import gpt_layout, tokens
from tests.test_experts import CONFIG
from tests.test_uneven_stages import short

NORMS = {"*": "bf16", "*norm*": "fp32"}
CASES = {
    "norms": NORMS,
    "the embedding": {"*": "bf16", "tokens": "fp32"},
    "MLPs": {"*": "fp32", "*mlp*": "bf16"},
    "float16": {"*": "bf16", "*attention*": "fp16", "*/out/*": "bf16"},
}
MESHES = {
    "FSDP": (FSDP, {"fsdp": 4}, {}),
    "a pipeline": (PIPE | ZERO1, {"pipe": 2, "data": 2}, {"schedule": Schedule("1f1b", 2)}),
}


def products(step):
    """Return how many products a step has in each dtype."""
    text = str(step.trace(tokens(16)).jaxpr)
    found = re.findall(r":(\w+)\[[^\]]*\] = dot_general", text)
    return {dtype: found.count(dtype) for dtype in sorted(set(found))}


def losses(layout, precision, steps=3, **run):
    step, state, found = (
        hfjax.train_step(layout, next_token_loss, precision=precision, **run),
        hfjax.init(layout),
        [],
    )
    for _ in range(steps):
        state, metrics = step(state, tokens(16))
        found.append(float(metrics["loss"]))
    return found, step


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("where", MESHES)
def test_a_mapping_trains_as_on_one_device(name, where):
    strategy, sizes, run = MESHES[where]
    found, _ = losses(gpt_layout(strategy.edit(replicate_below=0), sizes), CASES[name], **run)
    wanted, _ = losses(gpt_layout(DDP, {"data": 1}), CASES[name])
    np.testing.assert_allclose(found, wanted, rtol=2e-4)


@pytest.mark.slow
def test_only_what_is_named_is_computed_otherwise():
    layout = gpt_layout(DDP, {"data": 1})
    count = lambda precision: products(
        hfjax.train_step(layout, next_token_loss, precision=precision)
    )
    plain = count("bf16")
    assert count(NORMS) == plain
    assert count({"*": "bf16", "tokens": "fp32"}) == {
        "bf16": plain["bf16"] - 3,  # of the head, which is the embedding
        "f32": plain["f32"] + 3,
    }
    wide = count("fp32")
    assert count(CASES["MLPs"]) == {"bf16": 6, "f32": wide["f32"] - 6}


@pytest.mark.slow
def test_float32_norms_are_those_that_are_cast_by_hand():
    """In bfloat16 a norm multiplies by a rounded scale; by path it does not."""
    layout = gpt_layout(DDP, {"data": 1})
    state = hfjax.init(layout)

    def by_hand(params, batch):
        cast = lambda path, x: x if "norm" in jax.tree_util.keystr(path) else x.astype("bfloat16")
        cast = jax.tree_util.tree_map_with_path(cast, params)
        model = layout.template.merge(flatten(cast), {}, "train")
        x = model.embed(batch)
        for i in range(layout.template.num_layers):
            graph, arrays = nnx.split(model.layers)
            x = nnx.merge(graph, jax.tree.map(lambda a, i=i: a[i], arrays))(x)
        mean = next_token_loss(model.head(x), batch)
        return mean.total / mean.weight

    step = hfjax.train_step(layout, next_token_loss, precision=NORMS)
    wanted = by_hand(state.params, jax.tree.map(jnp.asarray, tokens(16)))
    _, metrics = step(state, tokens(16))
    np.testing.assert_allclose(float(metrics["loss"]), float(wanted), rtol=1e-6)


@pytest.mark.slow
def test_a_path_is_gathered_and_reduced_in_its_own_type():
    layout = gpt_layout(FSDP.edit(replicate_below=0), {"fsdp": 4})

    def sent(precision):
        step = hfjax.train_step(layout, next_token_loss, precision=precision)
        found = hfjax.collectives(step.lower(tokens(16)))
        return [found.total(kind, "fsdp") for kind in ("all-gather", "reduce-scatter")]

    wide, narrow = sent("fp32"), sent("bf16")
    norms, others = sent(NORMS), sent({"*": "fp32", "*norm*": "bf16"})
    assert norms[0] - narrow[0] == wide[0] - others[0] > 0
    assert norms[1] == narrow[1] == wide[1]  # gradients are reduced in float32 either way
    halved = sent({"*": "bf16", "*mlp*": hfjax.Precision("bfloat16", reduce="bfloat16")})
    placed = layout.param_specs.items()
    mlp = sum(math.prod(p.shape) for path, p in placed if "mlp" in path)
    assert narrow[1] - halved[1] == 2 * mlp


def test_the_table_of_a_step_shows_the_types():
    layout = gpt_layout(DDP, {"data": 1})
    told = str(hfjax.train_step(layout, next_token_loss, precision=NORMS).dtypes).splitlines()
    assert told[0].split() == ["parameter", "computed", "gathered", "reduced"]
    by_path = dict(line.split(maxsplit=1) for line in told[1:])
    assert by_path["norm/scale"].split() == ["float32"] * 3
    assert by_path["tokens"].split() == ["bfloat16", "bfloat16", "float32"]


@pytest.mark.slow
def test_one_float16_entry_puts_the_step_under_the_scale():
    _, step = losses(gpt_layout(DDP, {"data": 1}), CASES["float16"], 1)
    assert step.execution.precision.scale == hfjax.LossScale()


@pytest.mark.parametrize("pattern", ["*router*", "*norm*", "*each*", "tokens"])
@pytest.mark.short("*each*")
def test_a_mixture_takes_a_mapping(pattern):
    model = lambda rngs: MoELlama(CONFIG, rngs=rngs)
    layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), DDP)
    precision = {"*": "bf16", pattern: "fp32"}
    step = hfjax.train_step(layout, moe.next_token_loss, precision=precision)
    step.trace(tokens(8, length=16))
    with pytest.raises(ValueError, match="the arrays of the experts layers/mlp/each apart"):
        hfjax.train_step(layout, moe.next_token_loss, precision={"*": "bf16", "*down": "fp32"})


# -- models of one's own ------------------------------------------------------------------------


class Own(nnx.Module):
    """Two maps with a norm between them, which may hand on what it is given."""

    def __init__(self, cast, *, rngs):
        self.first, self.second = (nnx.Linear(8, 8, rngs=rngs, dtype=None) for _ in range(2))
        self.norm, self.cast = nnx.Param(jnp.ones((8,))), cast

    def __call__(self, x):
        x = self.first(x)
        y = x * self.norm[...][None]
        return self.second(y.astype(x.dtype) if self.cast else y)


def own_step(cast, precision):
    model = lambda rngs: Own(cast, rngs=rngs)
    layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), DDP)
    return hfjax.train_step(layout, lambda y, batch: (y**2).mean(), precision=precision)


def test_what_one_parameter_widens_is_refused_with_its_line():
    x = np.ones((8, 8), np.float32)
    own_step(True, {"*": "bf16", "norm": "fp32"}).lower(x)
    own_step(False, {"*": "bf16", "second*": "fp32"}).lower(x)
    with pytest.raises(ValueError, match="in float32, which is in bfloat16 without norm"):
        own_step(False, {"*": "bf16", "norm": "fp32"}).lower(x)


def test_the_last_pattern_that_matches_counts():
    precision = PrecisionByPath({"*": "bf16", "*norm*": "fp32", "*norm1*": "bf16"})
    of = lambda path: precision.at(path).compute.name
    assert [of(p) for p in ("a/norm1/scale", "a/norm2/scale", "b")] == [
        "bfloat16",
        "float32",
        "bfloat16",
    ]
    assert parse_precision("bf16,*norm*=fp32") == PrecisionByPath(NORMS)
    assert parse_precision("bf16") == "bf16"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"*norm*": "fp32"}, r'of \*norm\*: what is all else\? Add "\*"'),
        ({"*": "bf16", "*nrom*": "fp32"}, r"pattern '\*nrom\*' matches no parameter. Nearest"),
        ({"*": "bf61"}, "precision='bf61': one of auto, stored"),
        ("bf16,*norm*=fp33", "precision='fp33': one of auto, stored"),
        ({1: "bf16"}, "is expected"),
    ],
)
def test_a_mapping_that_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        hfjax.train_step(gpt_layout(DDP, {"data": 1}), next_token_loss, precision=given)


def test_packed_layers_have_one_precision():
    mesh = hfjax.make_mesh(pipe=2, devices=jax.devices()[:2])
    layout = hfjax.layout(short, optax.sgd(0.1), mesh, PIPE)
    loss, run = lambda y, batch: (y**2).mean(), {"schedule": Schedule("gpipe", 2)}
    with pytest.raises(ValueError, match="layers/0/bias is packed into one row with others"):
        hfjax.train_step(layout, loss, precision={"*": "bf16", "layers/0/*": "fp32"}, **run)
    hfjax.train_step(layout, loss, precision={"*": "bf16", "after/*": "fp32"}, **run)


def narrowed(mapping):
    """A map in bfloat16 of what enters in float32."""
    model = lambda rngs: nnx.Linear(8, 8, rngs=rngs)
    layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), DDP)
    step = hfjax.train_step(layout, lambda y, batch: (y**2).mean(), precision=mapping)
    return step.lower(np.ones((8, 8), np.float32))


def test_a_parameter_that_meets_something_wider_is_refused():
    with pytest.raises(ValueError, match=r"in float32 of a parameter that kernel has in bfloat16"):
        narrowed({"*": "fp32", "kernel": "bf16"})
    with pytest.raises(ValueError, match="in float32"):
        own_step(False, {"*": "bf16", "norm": "fp32", "second*": "bf16"}).lower(
            np.ones((8, 8), np.float32)
        )
    layout = gpt_layout(DDP, {"data": 1})
    step = hfjax.train_step(layout, next_token_loss, precision={"*": "fp32", "tokens": "bf16"})
    wide = products(hfjax.train_step(layout, next_token_loss, precision="fp32"))
    assert products(step) == {"bf16": 3, "f32": wide["f32"] - 3}


MADE_OF = {
    "scaled": lambda w: w * 2,
    "normed": lambda w: w / jnp.linalg.norm(w),
    "joined": lambda w: jnp.concatenate([w, w], 1),
    "chosen": lambda w: jnp.where(w > 0, w, 0),
    "in a function": jax.jit(lambda w: w.T),
}


@pytest.mark.parametrize("name", MADE_OF)
def test_what_is_made_of_a_named_parameter_alone_is_named(name):
    forward = lambda model, x: (x @ model["first"]) @ MADE_OF[name](model["second"])
    model = lambda rngs: {"first": jnp.eye(8), "second": jnp.eye(8)}
    layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), DDP, forward=forward)
    loss, precision = lambda y, batch: (y**2).mean(), {"*": "bf16", "second": "fp32"}
    hfjax.train_step(layout, loss, precision=precision).lower(np.ones((8, 8), np.float32))


@pytest.mark.parametrize("given", ["bf16,*=fp32", "bf16,*norm*=fp32,*norm*=bf16", "*norm*=fp32"])
def test_words_that_contradict_each_other_are_refused(given):
    with pytest.raises(ValueError, match="a word for all else comes first"):
        parse_precision(given)
    assert parse_precision("bf16, *norm*=fp32") == PrecisionByPath(NORMS)
