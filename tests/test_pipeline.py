"""Every schedule trains as one device does, alone and beside every other way to split."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax import DDP, FSDP, PIPE, SEQUENCE, TENSOR, ZERO1, ZERO2, Mean, Schedule
from hfjax.models.gpt import next_token_loss
from hfjax.models.layers import run_stacked
from hfjax.parallel.schedules.named import SCHEDULES, build_table
from hfjax.testing import assert_strategies_agree
from tests.constant_stack import Stack, Tied, fixed, rows, stack, stack_layout, weighted
from tests.small_gpt import gpt, mlps, tokens

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
NAMED = {name for family in (FAMILIES | MORE).values() for name, *_ in family}
# A new row of SCHEDULES is here by itself; what stages update on the way: test_pipedream.py.
MORE["all other rows"] = [
    (name, 2, 4, builder.chunks)
    for name, builder in SCHEDULES.items()
    if name not in NAMED
    and builder.every is None
    and build_table(name, 2, 4, builder.chunks).trains
]


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
@pytest.mark.short("several chunks a stage")
def test_a_schedule_equals_one_device(family):
    cases = {
        f"{name}, {stages} stages, {microbatches} microbatches": (
            PIPE,
            {"pipe": stages},
            {"schedule": Schedule(name, microbatches, chunks)},
        )
        for name, stages, microbatches, chunks in (FAMILIES | MORE)[family]
    }
    batch = rows()
    batch["weight"][::3] = 0
    assert_strategies_agree(stack(dropout=0.1), weighted, batch, cases, steps=2, max_grad_norm=0.5)


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
    "tensor, sequence": (PIPE | TENSOR | SEQUENCE, {"pipe": 2, "tensor": 2}, "1f1b"),
    "a GPT, tensor": (PIPE | TENSOR, {"pipe": 2, "tensor": 2}, "1f1b"),
    "a GPT, data and tensor, sequence": (
        PIPE | TENSOR | SEQUENCE,
        {"pipe": 2, "data": 2, "tensor": 2},
        "1f1b",
    ),
    "a GPT, ZeRO-3 and tensor": (
        PIPE | FSDP | TENSOR,
        {"pipe": 2, "fsdp": 2, "tensor": 2},
        "zb",
    ),
}


@pytest.mark.short("ZeRO-3")
@pytest.mark.parametrize("name", MESHES)
def test_a_pipeline_beside_other_axes_equals_one_device(name):
    strategy, sizes, schedule = MESHES[name]
    fields = {"schedule": Schedule(schedule, 2), "gradient_accumulation_steps": 2}
    case = {name: (strategy.edit(replicate_below=0), sizes, fields)}
    kind = Stack if name == "tensor" else Tied  # no slice of what is split over tensor
    given = (partial(kind, dropout=0.1), weighted, rows())
    if "GPT" in name or "sequence" in name:  # layers that say where their stream lies
        given = ((gpt if "GPT" in name else mlps)(layers=4), next_token_loss, tokens())
    assert_strategies_agree(*given, case, steps=2, unroll=1)


LAST_TICKS = {
    "one chunk": (PIPE, {"pipe": 2, "data": 2}, Schedule("1f1b", 4)),
    "other chunks, too": (PIPE, {"pipe": 2, "data": 2}, Schedule("interleaved", 4, 2)),
    "on a V": (PIPE, {"pipe": 2, "data": 2}, Schedule("v", 4, 2)),
    "halves of backward passes": (PIPE, {"pipe": 2, "data": 2}, Schedule("zb", 4)),
    "what is split already": (
        PIPE | FSDP,
        {"pipe": 2, "data": 2, "fsdp": 2},
        Schedule("interleaved", 2, 2),
    ),
    "stages of unlike length": (PIPE, {"pipe": 2, "data": 2}, Schedule("1f1b", 2, balance=(3, 1))),
}


@pytest.mark.short("other chunks, too-1")
@pytest.mark.parametrize("unroll", [1, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("name", LAST_TICKS)
def test_gradients_summed_in_the_last_tick_are_those_of_one_device(name, unroll):
    strategy, sizes, schedule = LAST_TICKS[name]
    case = {name: (strategy.edit(replicate_below=0), sizes, {"schedule": schedule})}
    given = partial(Tied, dropout=0.1), weighted, rows()
    assert_strategies_agree(*given, case, steps=2, unroll=unroll, max_grad_norm=0.5)


class Gated(nnx.Module):
    """Layers with a gate whose balance is a loss: the stream is (activations, sum of losses)."""

    def __init__(self, count):
        self.gate = nnx.Param(fixed(count, 8, 4), axes=("embed", None))
        self.experts = nnx.Param(fixed(count, 4, 8, 8), axes=(None, "embed", "mlp"))

    def __call__(self, stream):
        x, auxiliary = stream
        share = jax.nn.softmax(x @ self.gate[...])
        y = jnp.einsum("...e,...d,edf->...f", share, x, self.experts[...])
        balance = 4 * (share.mean((0, 1)) ** 2).sum()
        return x + jnp.tanh(y), auxiliary + balance


class Mixture(nnx.Module):
    """Gated layers between two maps."""

    def __init__(self, rngs):
        self.inwards = nnx.Param(3 * fixed(3, 8), axes=(None, "embed"))
        self.layers = Gated(4)
        self.outwards = nnx.Param(3 * fixed(8), axes=("embed",))

    def embed(self, batch):
        return batch["x"] @ self.inwards[...], jnp.zeros(())

    def head(self, stream):
        x, auxiliary = stream
        return x @ self.outwards[...], auxiliary

    def __call__(self, batch):
        return self.head(run_stacked(self.layers, self.embed(batch)))


def with_balance(outputs, batch):
    y, balance = outputs
    errors = (y - batch["y"]) ** 2
    rows = errors.shape[0]
    return Mean(errors.mean(-1).sum() + 0.1 * rows * balance, rows, metrics={"balance": balance})


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["zb", *(pytest.param(name, marks=SLOW) for name in ("1f1b", "zb-h1"))]
)
def test_auxiliary_losses_travel_beside_the_activations(name):
    rng = np.random.default_rng(0)
    batch = {k: rng.normal(size=(8, 5, 3)[: 3 - i]).astype("f4") for i, k in enumerate("xy")}
    fields = {"schedule": Schedule(name, 2)}
    found = losses_of(Mixture, with_balance, batch, PIPE, {"pipe": 2}, fields)
    # the balance is a mean over each microbatch: one device takes as many
    wanted = losses_of(
        Mixture, with_balance, batch, DDP, {"data": 1}, {"gradient_accumulation_steps": 2}
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def losses_of(model, loss, batch, strategy, sizes, fields):
    layout = hfjax.layout(model, optax.adam(1e-2), hfjax.make_mesh(**sizes), strategy)
    step, state, found = hfjax.train_step(layout, loss, **fields), hfjax.init(layout), []
    for _ in range(4):
        state, metrics = step(state, batch)
        found.append([float(metrics["loss"]), float(metrics["balance"])])
    return found


@pytest.mark.slow
def test_ten_layers_on_four_stages_train_ten_layers():
    case = {"10 on 4": (PIPE, {"pipe": 4}, {"schedule": Schedule("1f1b", 8)})}
    assert_strategies_agree(stack(layers=10), weighted, rows(), case, steps=2, unroll=1)


@pytest.mark.slow
def test_a_balance_by_hand_is_followed():
    schedule = Schedule("1f1b", 4, balance=(2, 1))
    case = {"2 and 1": (PIPE, {"pipe": 2}, {"schedule": schedule})}
    assert_strategies_agree(stack(layers=3), weighted, rows(), case, steps=2)


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
    layout = stack_layout(PIPE | FSDP, {"pipe": 2, "fsdp": 2}, layers=2)
    step = hfjax.train_step(layout, weighted, schedule=Schedule("1f1b", 4), **fields)
    one = stack_layout(DDP, {"data": 1}, layers=2)
    plain = hfjax.train_step(one, weighted, gradient_accumulation_steps=4, **fields)
    state, reference = hfjax.init(layout), hfjax.init(one)
    for _ in range(3):
        state, found = step(state, rows())
        reference, wanted = plain(reference, rows())
        np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=2e-3)
