"""Idle slots skip their layers: the same numbers and messages, and no layer runs in vain."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import hfjax
from hfjax import CONTEXT, DDP, FSDP, GRID, PIPE, TENSOR, ZERO2, Schedule
from hfjax.analysis import hlo
from hfjax.models.gpt import next_token_loss
from hfjax.models.layers import stack_layers
from hfjax.parallel.mesh import TENSOR_AXES
from hfjax.parallel.pipeline.engine import PipelineEngine
from hfjax.parallel.schedules.cost import count_permutes
from hfjax.utils.paths import flatten
from tests.constant_stack import Layers, Stack, rows, stack, weighted
from tests.h200 import OPTIMIZED, h200s
from tests.small_gpt import gpt_layout, mlp_layout, tokens


def trained(model, schedule, strategy=PIPE, sizes=None, batch=None, freeze=None, **execution):
    """Return losses, norms and parameters of two steps in float64."""
    sizes = sizes or {"pipe": 2}
    with jax.enable_x64(True):
        devices = jax.devices()[: int(np.prod([*sizes.values()]))]
        mesh = hfjax.make_mesh(devices=devices, **sizes)
        layout = hfjax.layout(model, optax.sgd(0.1), mesh, strategy.edit(replicate_below=0))
        layout = layout.freeze(*freeze[0], **freeze[1]) if freeze else layout
        step = hfjax.train_step(layout, weighted, schedule=schedule, **execution)
        state, told = hfjax.init(layout, 0, schedule), []
        for _ in range(2):
            state, metrics = step(state, rows() if batch is None else batch)
            told += [metrics["loss"], metrics["grad_norm"]]
        left = flatten(hfjax.to_model_order(step.layout, state).params)
        assert all(x.dtype == jnp.float64 for x in left.values())
        return {"told": np.array(told)} | {path: hfjax.full_array(x) for path, x in left.items()}


def assert_equal(name, model, microbatches=4, **changes):
    """Compare losses and parameters with and without branches."""
    free, skips = (Schedule(name, microbatches, branches=wanted) for wanted in (False, "auto"))
    wanted, found = trained(model, free, **changes), trained(model, skips, **changes)
    for path, x in wanted.items():
        np.testing.assert_allclose(found[path], x, rtol=1e-12, atol=1e-14, err_msg=path)


NAMES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "v", "zb", "v-zb", "1f1b-published", "zb-v")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_branches_change_no_loss_and_no_parameter(name):
    assert_equal(name, stack(dropout=0.1))


CASES: dict[str, tuple] = {
    "fewer microbatches than stages": ({"sizes": {"pipe": 4}, "microbatches": 2}, "1f1b"),
    "one stage": ({"sizes": {"pipe": 1}}, "interleaved"),
    "ten layers on four stages": ({"sizes": {"pipe": 4}, "layers": 10}, "1f1b"),
    "remat": ({"remat": "full"}, "zb"),
    "remat, but for the last": ({"remat": "except_last"}, "interleaved"),
    "in a loop": ({"unroll": 1, "layers": 8}, "v"),
    "layers that stay": ({"freeze": (("layers/*",), {"first": 2})}, "1f1b"),
    "ZeRO-2": ({"strategy": PIPE | ZERO2, "sizes": {"pipe": 2, "data": 2}}, "interleaved"),
    "ZeRO-3": ({"strategy": PIPE | FSDP, "sizes": {"pipe": 2, "fsdp": 2}}, "1f1b"),
    "ZeRO-3, a task a tick": ({"strategy": PIPE | FSDP, "sizes": {"pipe": 2, "fsdp": 2}}, "zb-v"),
    "offload": ({"offload": 0.5}, "1f1b"),
    "stages that update by themselves": ({}, "pipedream"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_branches_change_nothing_beside_other_features(name):
    changes, schedule = CASES[name]
    layers = {"layers": changes.pop("layers")} if "layers" in changes else {}
    assert_equal(schedule, stack(dropout=0.1, **layers), **changes)


class ReadingAScale(nnx.Module):
    """A layer that reads a variable, as a norm reads its running statistics, and no parameter."""

    def __init__(self, rngs):
        self.mean = nnx.BatchStat(jnp.ones(8))

    def __call__(self, x):
        return jnp.sin(x - 0.1 * self.mean[...][None])


class Reading(Stack):
    """Layers without parameters between two maps."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.layers = stack_layers(4, lambda rngs: ReadingAScale(rngs), rngs)


class Numbered(Stack):
    """Layers that hand on whole numbers beside x: their gradients are none."""

    def embed(self, batch):
        x = super().embed(batch)
        return x, jnp.arange(x.shape[0], dtype=jnp.int32)[:, None] % 2

    def head(self, x):
        return super().head(x[0])

    def __init__(self, rngs):
        super().__init__(rngs)
        self.layers = NumberedLayers(4, 0, rngs)


class NumberedLayers(Layers):
    def __call__(self, x) -> Any:
        x, number = x
        return super().__call__(x + number.astype(x.dtype)), 1 - number


@pytest.mark.slow
def test_whole_numbers_beside_activations_share_their_permutes():
    """zb-v: their gradients, of which there are none, arrive as zeros of the same form."""
    assert_equal("zb-v", Numbered)
    found = trained(Numbered, Schedule("zb-v", 4))
    wanted = trained(Numbered, None, DDP, {"data": 1}, gradient_accumulation_steps=4)
    for path, x in wanted.items():
        np.testing.assert_allclose(found[path], x, rtol=1e-9, err_msg=path)


def test_layers_that_have_no_parameter_at_all_leave_stages_nothing_to_hold():
    with pytest.raises(ValueError, match="pipe splits neither the batch nor a parameter"):
        trained(Reading, Schedule("1f1b", 4))


class Unlike(Stack):
    """Layers of unlike work, one of which reads a variable and none of which is of one form."""

    def __init__(self, rngs):
        super().__init__(rngs)
        linear = partial(nnx.Linear, param_dtype=jnp.float64, rngs=rngs)
        wide, narrow = linear(8, 24), linear(24, 8)
        self.layers = nnx.List([wide, jnp.tanh, narrow, ReadingAScale(rngs)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "v"])
def test_chunks_of_unlike_work_and_layers_without_parameters(name):
    assert_equal(name, Unlike)


# -- what runs ----------------------------------------------------------------------------------

RAN: list[str] = []


def telling(what, x):
    """Return x, and write down that it was there."""

    def tell(number):
        RAN.append(what)
        return np.zeros_like(number)

    def call(number):  # a callback wants all axes of the mesh manual
        return jax.pure_callback(tell, jax.ShapeDtypeStruct((), x.dtype), number)

    call = jax.shard_map(
        call, in_specs=P(), out_specs=P(), axis_names={*TENSOR_AXES}, check_vma=False
    )
    return x + call(x.reshape(-1)[0])


@jax.custom_vjp
def told(x):
    return telling("forward", x)


told.defvjp(lambda x: (telling("forward", x), None), lambda _, dx: (telling("backward", dx),))


class Telling(Layers):
    def __call__(self, x):
        return super().__call__(told(x))


class Told(Stack):
    def __init__(self, rngs, layers):
        super().__init__(rngs)
        self.layers = Telling(layers, 0, rngs)


@pytest.mark.parametrize("name", ["1f1b", "v", "zb-h1"])
@pytest.mark.short("v")
def test_a_layer_runs_once_for_each_microbatch_and_nowhere_else(name):
    """Neither in slots without a task nor where storage is only padded."""
    layers, microbatches, ran = 5, 8, {}
    for branches in ("auto", False):
        schedule = Schedule(name, microbatches, branches=branches)
        mesh = hfjax.make_mesh(pipe=2, devices=jax.devices()[:2])
        layout = hfjax.layout(partial(Told, layers=layers), optax.sgd(0.1), mesh, PIPE)
        step = hfjax.train_step(layout, weighted, schedule=schedule)
        state = hfjax.init(layout, 0, schedule)
        RAN.clear()
        jax.block_until_ready(step(state, rows()))
        ran[branches] = Counter(RAN)
    assert ran["auto"] == {"forward": layers * microbatches, "backward": layers * microbatches}
    assert all(ran[False][kind] > count for kind, count in ran["auto"].items())


def lowered(schedule, strategy=PIPE, sizes=None, **execution):
    layout = mlp_layout(strategy, sizes or {"pipe": 4}, layers=8)
    step = hfjax.train_step(layout, next_token_loss, schedule=schedule, **execution)
    return step.lower(tokens())


@pytest.mark.short("1f1b", "interleaved")
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "v"])
def test_branches_send_as_many_messages_and_none_of_them_in_a_branch(name):
    counts = []
    for branches in (False, True):
        found = hfjax.collectives(lowered(Schedule(name, 8, branches=branches)))
        messages = [row for row in found if row.kind == "permute"]
        assert not any("branch" in row.where for row in messages)
        counts.append(sum(row.count for row in messages))
    assert counts[0] == counts[1] == count_permutes(Schedule(name, 8).table(4))


@pytest.mark.slow
def test_what_is_gathered_stays_outside_of_branches_unless_most_slots_are_idle():
    """A gather in a branch is not started early, and there are few idle slots under 1f1b."""
    given = {"strategy": PIPE | FSDP, "sizes": {"pipe": 2, "fsdp": 2}}
    bytes_of = {}
    for name, branches in (("1f1b", False), ("1f1b", "auto"), ("zb-h1", "auto")):
        found = hfjax.collectives(lowered(Schedule(name, 4, branches=branches), **given))
        gathers = [row for row in found if row.kind == "all-gather" and row.where]
        assert {"branch" in row.where for row in gathers} == {name == "zb-h1"}
        bytes_of[name, branches] = found.total("all-gather", "fsdp")
    assert bytes_of["1f1b", False] == bytes_of["1f1b", "auto"]


# -- where it is off, and what is refused -------------------------------------------------------


def branches_of(monkeypatch, schedule, strategy, sizes):
    """Return whether a step's program branches over layers."""
    seen, asked = [], PipelineEngine.branches
    note = lambda plane, program: seen.append(asked(plane, program)) or seen[-1]
    monkeypatch.setattr(PipelineEngine, "branches", note)
    lowered(schedule, strategy, sizes)
    monkeypatch.setattr(PipelineEngine, "branches", asked)
    return seen[-1] is not None


@pytest.mark.slow
def test_auto_is_on_where_no_collective_of_a_layer_can_wait(monkeypatch):
    of = partial(branches_of, monkeypatch)
    free, published = Schedule("1f1b", 4), Schedule("1f1b-published", 4)
    never, tensor = Schedule("1f1b-published", 4, branches=False), {"pipe": 2, "tensor": 2}
    assert of(free, PIPE | FSDP, {"pipe": 2, "fsdp": 2})
    assert of(free, PIPE | DDP, {"pipe": 2, "data": 2})
    assert not of(free, PIPE | TENSOR, tensor)
    assert not of(free, PIPE | CONTEXT, {"pipe": 2, "context": 2})
    assert not of(free, PIPE | GRID, {"pipe": 2, "row": 2, "tensor": 2})
    assert of(published, PIPE | TENSOR, tensor)
    assert not of(never, PIPE | TENSOR, tensor)


@pytest.mark.parametrize(
    ("strategy", "axis"), [(TENSOR, "tensor"), (CONTEXT, "context")], ids=["tensor", "context"]
)
def test_branches_where_a_collective_may_wait_are_refused_with_the_axis(strategy, axis):
    message = (
        rf'1f1b, branches=True with {axis}=2: .* permute.*Use branches="auto" or branches=False'
    )
    with pytest.raises(ValueError, match=message):
        lowered(Schedule("1f1b", 4, branches=True), PIPE | strategy, {"pipe": 2, axis: 2})


def test_branches_are_true_false_or_auto():
    given: tuple[Any, ...] = "yes", 1, None
    for wrong in given:
        with pytest.raises(ValueError, match=rf'branches={wrong!r}: True, False or "auto"'):
            Schedule("1f1b", 4, branches=wrong)
    text = "0F0 0F1 0B0 0B1\n1F0+1B0 1F1+1B1"
    assert Schedule.from_text(text).branches == Schedule.from_text(text, branches="auto").branches
    assert Schedule.from_text(text, branches=False).branches is False


class Permuting(nnx.Module):
    """A layer with a branch of its own, in which it sends its rows to a neighbour."""

    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.eye(8), axes=("embed", None))

    def __call__(self, x):
        send = lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)])
        return x @ lax.cond(x.sum() > 1e9, send, lambda x: x, self.weight[...])


class Permuted(Stack):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.layers = stack_layers(4, lambda rngs: Permuting(rngs), rngs)


@pytest.mark.parametrize(
    ("name", "branches", "written"),
    [("1f1b", True, "schedule 1f1b, branches=True"), ("zb-h1", "auto", "schedule zb-h1")],
)
def test_a_layer_whose_own_branch_permutes_is_refused_where_stages_skip_it(name, branches, written):
    sizes = {"pipe": 2, "data": 2}
    with pytest.raises(
        ValueError, match=f"{written}: a layer permutes over data.*psum, all_gather"
    ):
        trained(
            Permuted, Schedule(name, 4, branches=branches), PIPE | DDP, sizes, batch_view="local"
        )


# -- compiled for GPUs --------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["1f1b", "1f1b-published", "zb-v"])
def test_compiled_for_h200s_no_branch_copies_a_ring_and_all_that_is_sent_is_asynchronous(name):
    sizes = {"pipe": 4, "fsdp": 2}
    fields = {"devices": h200s(), "length": 64, "embed": 128, "layers": 8}
    layout = gpt_layout(PIPE | FSDP, sizes, **fields)
    schedule = Schedule(name, 8)
    step: Any = hfjax.train_step(layout, next_token_loss, schedule=schedule, precision="bf16")
    batch = tokens(length=64)
    text = step.lower(batch).compile(OPTIMIZED).as_text()
    held = ring_arrays(step, batch)
    assert len(held) > 3
    lines = in_branches(text)
    opcodes = {line: hlo._parse(line).opcode for line in lines}
    copies = (line for line in lines if opcodes[line].startswith("copy"))
    assert not held & {"{}[{}]".format(*hlo._ARRAY.findall(line)[0]) for line in copies}
    assert not {"collective-permute", "collective-permute-start"} & set(opcodes.values())
    assert not re.search(r" (collective-permute|all-gather)\(", text)


def in_branches(text):
    """Return the instructions in all branches of conditionals, and in what these call."""
    computations, _ = hlo._computations(text)
    lines = {name: [r for r in held.values() if "(" in r] for name, held in computations.items()}
    ops = {name: list(map(hlo._parse, held)) for name, held in lines.items()}
    keys = (*hlo._CALLS, *hlo._BRANCHES, "body", "condition")

    def reached(name):
        return {name}.union(*(reached(called) for op in ops[name] for called in op.calls(keys)))

    conditionals = (op for held in ops.values() for op in held if op.opcode == "conditional")
    branches = {b for op in conditionals for b in op.calls(hlo._BRANCHES)}
    return [line for name in set().union(*map(reached, branches)) for line in lines[name]]


def ring_arrays(step, batch):
    """Return the arrays of a stage's rings as a program's text names them."""
    state, told = step.layout.abstract_state(), {}
    watch = lambda pipeline: told.update(jax.eval_shape(pipeline.init_state))
    given = flatten(state.params), flatten(state.variables), batch, state.step
    jax.eval_shape(replace(step.engine, on_build=watch).gradients, *given)
    arrays = jax.tree.leaves(
        [told[name] for name in ("stash", "w_residuals", "b_to_w", "gradients")]
    )
    short = {"bfloat16": "bf16", "float32": "f32", "int32": "s32", "bool": "pred"}
    show = lambda x: f"{short[x.dtype.name]}[{','.join(map(str, x.shape))}]"
    return {show(x) for x in arrays if x.ndim}
