"""Every schedule trains as one device does, alone and beside every other way to split."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax import DDP, FSDP, PIPE, SEQUENCE, TENSOR, ZERO1, ZERO2, Mean, Schedule
from hfjax.models.gpt import next_token_loss
from hfjax.models.parts import stacked
from hfjax.testing import assert_strategies_agree
from tests.small_gpt import gpt, mlp_layout, mlps, tokens

SLOW = pytest.mark.slow

# {what the schedules of a family share: (name, stages, microbatches, chunks)}
FAMILIES = {
    "whole backward passes": [
        ("1f1b", 4, 2, 1),  # fewer microbatches than stages; more: below, with ten layers
        ("1f1b", 1, 4, 1),
    ],
    "several chunks a stage": [("interleaved", 2, 4, 2), ("dualpipe-v", 2, 4, 2)],
    "backward passes in two": [("zb-h1", 4, 8, 1), ("zb-v", 2, 8, 2)],
}
MORE = {  # other orders of what these families do
    "more whole backward passes": [
        ("1f1b", 4, 8, 1),
        ("gpipe", 4, 8, 1),
        ("1f1b-published", 2, 4, 1),
    ],
    "more chunks": [("looped-bfs", 2, 4, 2), ("v", 2, 8, 2)],
    "more backward passes in two": [("zb", 4, 8, 1), ("zb", 2, 4, 2), ("v-zb", 2, 8, 2)],
}


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(m, marks=SLOW) for m in MORE)])
@pytest.mark.drawn
def test_a_schedule_equals_one_device(family):
    cases = {
        f"{name}, {stages} stages, {microbatches} microbatches": (
            PIPE,
            {"pipe": stages},
            {"schedule": Schedule(name, microbatches, chunks)},
        )
        for name, stages, microbatches, chunks in (FAMILIES | MORE)[family]
    }
    mask = tokens()["tokens"][:, 1:] % 3 > 0
    model = mlps(layers=4, dropout=0.1)
    batch = tokens(mask=mask.astype("float32"))
    assert_strategies_agree(model, next_token_loss, batch, cases, steps=2, clip=0.5)


@SLOW
def test_collectives_of_cpu_devices_never_meet_others():
    """Without `options_of_cpus` one run in five has other losses, hangs or ends in XLA."""
    mesh = hfjax.make_mesh(pipe=2, data=2, fsdp=2)
    strategy, schedule = (PIPE | FSDP).edit(replicate_below=0), Schedule("interleaved", 4, 2)
    layout = hfjax.layout(gpt(layers=4, dropout=0.1), optax.adamw(1e-3), mesh, strategy)
    step, losses = hfjax.train_step(layout, next_token_loss, schedule=schedule), set()
    for _ in range(10):
        state = hfjax.init(layout, 0, schedule)
        told = []
        for _ in range(3):
            state, metrics = step(state, tokens())
            told.append(float(metrics["loss"]))
        losses.add(tuple(told))
    assert len(losses) == 1


MESHES = {
    "data": (PIPE | DDP, {"pipe": 2, "data": 2}, "1f1b"),
    "ZeRO-1": (PIPE | ZERO1, {"pipe": 2, "data": 2, "fsdp": 2}, "interleaved"),
    "ZeRO-2": (PIPE | ZERO2, {"pipe": 2, "data": 2}, "zb"),
    "ZeRO-3": (PIPE | FSDP, {"pipe": 2, "fsdp": 2}, "1f1b"),
    "tensor": (PIPE | TENSOR, {"pipe": 2, "tensor": 2}, "1f1b"),
    "data and tensor, sequence": (
        PIPE | TENSOR | SEQUENCE,
        {"pipe": 2, "data": 2, "tensor": 2},
        "1f1b",
    ),
    "ZeRO-3 and tensor": (PIPE | FSDP | TENSOR, {"pipe": 2, "fsdp": 2, "tensor": 2}, "zb"),
}


MESHES["a GPT, data and tensor, sequence"] = MESHES["data and tensor, sequence"]
LONG = (  # those with a tensor axis train GPTs
    *("data", "ZeRO-1", "ZeRO-3", "tensor", "ZeRO-3 and tensor"),
    "a GPT, data and tensor, sequence",
)


@pytest.mark.parametrize("name", [pytest.param(m, marks=SLOW) if m in LONG else m for m in MESHES])
@pytest.mark.drawn
def test_a_pipeline_beside_other_axes_equals_one_device(name):
    strategy, sizes, schedule = MESHES[name]
    fields = {"schedule": Schedule(schedule, 2), "accumulate": 2}
    case = {name: (strategy.edit(replicate_below=0), sizes, fields)}
    model = gpt if "tensor" in sizes and name in LONG else mlps
    assert_strategies_agree(model(layers=4), next_token_loss, tokens(), case, steps=2, unroll=1)


class Gated(nnx.Module):
    """A layer with a gate whose balance is a loss: the stream is (activations, sum of losses)."""

    def __init__(self, rngs):
        normal = lambda *shape: 0.3 * jax.random.normal(rngs.params(), shape)
        self.gate = nnx.Param(normal(8, 4), axes=("embed", None))
        self.experts = nnx.Param(normal(4, 8, 8), axes=(None, "embed", "mlp"))

    def __call__(self, stream):
        x, auxiliary = stream
        share = jax.nn.softmax(x @ self.gate[...])
        y = jnp.einsum("...e,...d,edf->...f", share, x, self.experts[...])
        balance = 4 * (share.mean((0, 1)) ** 2).sum()
        return x + jnp.tanh(y), auxiliary + balance


class Mixture(nnx.Module):
    """Gated layers between two maps."""

    def __init__(self, rngs):
        self.inwards = nnx.Param(jax.random.normal(rngs.params(), (3, 8)), axes=(None, "embed"))
        self.layers = stacked(4, Gated, rngs)
        self.outwards = nnx.Param(jax.random.normal(rngs.params(), (8,)), axes=("embed",))

    def embed(self, batch):
        return batch["x"] @ self.inwards[...], jnp.zeros(())

    def head(self, stream):
        x, auxiliary = stream
        return x @ self.outwards[...], auxiliary

    def __call__(self, batch):
        graph, layers = nnx.split(self.layers)
        step = lambda stream, layer: (nnx.merge(graph, layer)(stream), None)
        return self.head(jax.lax.scan(step, self.embed(batch), layers)[0])


def with_balance(outputs, batch):
    y, balance = outputs
    errors = (y - batch["y"]) ** 2
    rows = errors.shape[0]
    return Mean(errors.mean(-1).sum() + 0.1 * rows * balance, rows, metrics={"balance": balance})


@pytest.mark.parametrize(
    "name", ["zb", *(pytest.param(name, marks=SLOW) for name in ("1f1b", "zb-h1"))]
)
def test_auxiliary_losses_travel_beside_the_activations(name):
    rng = np.random.default_rng(0)
    batch = {k: rng.normal(size=(8, 5, 3)[: 3 - i]).astype("f4") for i, k in enumerate("xy")}
    fields = {"schedule": Schedule(name, 2)}
    found = losses_of(Mixture, with_balance, batch, PIPE, {"pipe": 2}, fields)
    # the balance is a mean over each microbatch: one device takes as many
    wanted = losses_of(Mixture, with_balance, batch, DDP, {"data": 1}, {"accumulate": 2})
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def losses_of(model, loss, batch, strategy, sizes, fields):
    layout = hfjax.layout(model, optax.adam(1e-2), hfjax.make_mesh(**sizes), strategy)
    step, state, found = hfjax.train_step(layout, loss, **fields), hfjax.init(layout), []
    for _ in range(4):
        state, metrics = step(state, batch)
        found.append([float(metrics["loss"]), float(metrics["balance"])])
    return found


def test_ten_layers_on_four_stages_train_ten_layers():
    model = mlps(layers=10, embed=16, length=8)
    schedule = Schedule("1f1b", 8)
    case = {"10 on 4": (PIPE, {"pipe": 4}, {"schedule": schedule})}
    batch = {"tokens": tokens(8, length=8)["tokens"]}
    assert_strategies_agree(model, next_token_loss, batch, case, steps=2, unroll=1)


def test_a_balance_by_hand_is_followed():
    schedule = Schedule("1f1b", 4, balance=(2, 1))
    case = {"2 and 1": (PIPE, {"pipe": 2}, {"schedule": schedule})}
    assert_strategies_agree(mlps(layers=3), next_token_loss, tokens(), case, steps=2)


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "bf16"},
        *(pytest.param({"remat": remat}, marks=SLOW) for remat in ("full", "dots")),
    ],
)
def test_precision_and_remat_are_those_of_the_step_without_a_pipeline(fields):
    if "remat" in fields:
        case = {"remat": (PIPE, {"pipe": 2}, {"schedule": Schedule("zb", 4)})}
        assert_strategies_agree(mlps(), next_token_loss, tokens(), case, steps=2, **fields)
        return
    layout = mlp_layout(PIPE | FSDP, {"pipe": 2, "fsdp": 2})
    step = hfjax.train_step(layout, next_token_loss, schedule=Schedule("1f1b", 4), **fields)
    one = mlp_layout(DDP, {"data": 1})
    plain = hfjax.train_step(one, next_token_loss, accumulate=4, **fields)
    state, reference = hfjax.init(layout), hfjax.init(one)
    for _ in range(3):
        state, found = step(state, tokens())
        reference, wanted = plain(reference, tokens())
        np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=2e-3)
