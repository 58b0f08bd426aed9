"""Layers that lie on the host are fetched one ahead of the one that runs; nothing else changes."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hfjax
from hfjax import DDP, FSDP, HOST_OPTIMIZER, HOST_PARAMETERS, ZERO1
from hfjax.models.attention import dot_product
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from hfjax.models.layers import stack_layers
from hfjax.parallel.jaxprs.walk import equations_in
from tests.h200 import OPTIMIZED, h200s
from tests.small_gpt import gpt_layout, mlp_layout, tokens
from tests.small_stack import Bent, Stack, rows, squared, stack_layout
from tests.test_in_backward import Listed

LAYERS = 3
ADAMW = optax.adamw(1e-3, eps=1e-4)


def run(layout, loss=squared, steps=2, **execution):
    """The metrics and the state at the end, in host memory; and what an evaluation tells."""
    batch, state, step = rows(), hfjax.init(layout), hfjax.train_step(layout, loss, **execution)
    told = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        told.append({name: float(x) for name, x in metrics.items()})
    for x, where in zip(jax.tree.leaves(state), jax.tree.leaves(layout.shardings()), strict=True):
        assert x.sharding.is_equivalent_to(where, x.ndim)
        assert x.sharding.memory_kind == where.memory_kind
    evaluated = float(hfjax.eval_step(layout, loss)(state, batch)["loss"])
    return told, hfjax.full_array((state.params, state.optimizer)), evaluated


def assert_equal(found, wanted, rounding=0.0):
    """The losses to the bit; parameters and moments too, where two programs round alike."""
    assert found[0] == wanted[0]
    assert found[2] == wanted[2]
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=rounding, atol=1e-4 * rounding)


CASES = {
    "DDP": (DDP, {"data": 2}, {}),
    "FSDP, remat": (FSDP, {"fsdp": 2}, {"remat": "full"}),
    "ZERO1, bf16": (ZERO1, {"data": 2}, {"precision": "bf16"}),
}
LONG = (("DDP", False), ("DDP", True), ("ZERO1, bf16", False), ("ZERO1, bf16", True))
TRAINED = [
    pytest.param(
        *(case, in_backward),
        id=f"{case}, {'in backward' if in_backward else 'ordinary'}",
        marks=pytest.mark.slow if (case, in_backward) in LONG else [],
    )
    for case in CASES
    for in_backward in (False, True)
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "in_backward"), TRAINED)
def test_parameters_on_the_host_train_and_evaluate(case, in_backward):
    strategy, sizes, execution = CASES[case]
    layout = partial(stack_layout, sizes=sizes, optimizer=ADAMW, layers=LAYERS)
    execution = execution | {"optimizer_in_backward": in_backward}
    found = run(layout(strategy | HOST_PARAMETERS), **execution)
    wanted = run(layout(strategy), **execution)
    assert_equal(found, wanted, rounding=1e-5 if "precision" in execution else 0.0)


@pytest.mark.parametrize(
    "in_backward",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["ordinary", "in backward"],
)
def test_a_list_of_layers_is_fetched_one_by_one(in_backward):
    mesh = hfjax.make_mesh(devices=jax.devices()[:2], fsdp=2)
    layout = lambda strategy: hfjax.layout(Listed, ADAMW, mesh, strategy.edit(replicate_below=0))
    execution = {"optimizer_in_backward": in_backward}
    found, wanted = (
        run(layout(strategy), **execution) for strategy in (FSDP | HOST_PARAMETERS, FSDP)
    )
    assert_equal(found, wanted)


@pytest.mark.slow
def test_the_optimizer_on_the_host_too_is_streamed_by_the_layer_that_is_updated():
    far = FSDP | HOST_PARAMETERS | HOST_OPTIMIZER
    layout = lambda strategy: stack_layout(strategy, {"fsdp": 2}, ADAMW)
    found, wanted = (run(layout(s), optimizer_in_backward=True) for s in (far, FSDP))
    assert_equal(found, wanted)


def test_master_weights_are_what_parameters_are_rounded_from():
    layout = lambda strategy: stack_layout(
        strategy, {"fsdp": 2}, hfjax.optimizers.master_weights(ADAMW)
    )
    execution = {"optimizer_in_backward": True, "precision": "bf16"}
    found = run(layout(FSDP | HOST_PARAMETERS | HOST_OPTIMIZER), **execution)
    assert_equal(found, run(layout(FSDP), **execution))
    params, kept = found[1]
    for param, master in zip(jax.tree.leaves(params), jax.tree.leaves(kept.master), strict=True):
        np.testing.assert_array_equal(param, master.astype(param.dtype))


@pytest.mark.parametrize(
    ("execution", "message"),
    [
        (
            {"remat": "every:2"},
            r"HOST_PARAMETERS with .*every:2.* recomputes several layers together",
        ),
        (
            {"offload": hfjax.Offload(ratio=0.5)},
            r"HOST_PARAMETERS with offload=0.5: .* hfjax's own loop over layers",
        ),
        (
            {"reshard_after_forward": False},
            r"with reshard_after_forward=False: .*=False keeps all layers on the",
        ),
        (
            {"schedule": hfjax.Schedule("gpipe", 2)},
            r"HOST_PARAMETERS with schedule gpipe: a pipeline keeps its",
        ),
    ],
)
def test_what_keeps_layers_on_the_device_is_refused(execution, message):
    layout = stack_layout(FSDP | HOST_PARAMETERS, {"fsdp": 2}, ADAMW)
    with pytest.raises(ValueError, match=message):
        hfjax.train_step(layout, squared, **execution)


def test_a_pipe_axis_is_refused_before_the_rule_that_it_lacks_is_advised():
    layout = stack_layout(FSDP | HOST_PARAMETERS, {"pipe": 2, "fsdp": 2}, ADAMW)
    with pytest.raises(ValueError, match=r"with schedule gpipe: .* Set pipe=1 and leave the sch"):
        hfjax.train_step(layout, squared, schedule=hfjax.Schedule("gpipe", 2))


# --- what is transferred --------------------------------------------------------------------


def transfers(jaxpr):
    """[bytes to the device, bytes to the host] of a program, its loops multiplied out."""
    found = np.zeros(2, int)
    for equation, times in equations_in(jaxpr.jaxpr):
        if equation.primitive.name == "device_put":
            for x, y in zip(equation.invars, equation.outvars, strict=True):
                there, back = is_on_host(x.aval), is_on_host(y.aval)
                size = math.prod(y.aval.shape) * y.aval.dtype.itemsize * times
                found += [size * (there and not back), size * (back and not there)]
    return found


def is_on_host(aval):
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def sizes_of(layout):
    """Bytes on a device of one layer, and of what lies outside the layers."""
    size = lambda p: math.prod(p.local("parameter")) * jnp.dtype(p.dtype).itemsize
    layers = sum(size(p) for p in layout.param_specs.values() if p.stacked)
    return layers // LAYERS, sum(size(p) for p in layout.param_specs.values()) - layers


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [DDP, FSDP], ids=["DDP", "FSDP"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_each_layer_comes_twice_in_a_step_and_one_more(strategy, remat):
    """The last layer stays for its backward pass; the first comes once more, for nothing."""
    sizes = {"data": 2} if strategy is DDP else {"fsdp": 2}
    strategy = strategy | HOST_PARAMETERS
    layout = mlp_layout(strategy, sizes, ADAMW, jax.devices()[:2], layers=LAYERS)
    step = hfjax.train_step(layout, next_token_loss, optimizer_in_backward=True, remat=remat)
    layer, ends = sizes_of(layout)
    # The ends come at the beginning, and once more for their update.
    wanted = [(2 * LAYERS + 1) * layer + 2 * ends, LAYERS * layer + ends]
    to_device, to_host = transfers(step.trace(tokens()).jaxpr)
    share = 2 if strategy.name.startswith("FSDP") else 1  # outside of the data plane: whole
    assert to_device == wanted[0] + (share - 1) * ends
    assert to_host == wanted[1] + (share - 1) * ends


# --- what is held ---------------------------------------------------------------------------


EMBED, LENGTH = 512, 128
LAYER = 12 * EMBED * EMBED * 4  # bytes of one layer's kernels


def compiled(layers, in_backward):
    """A step in bfloat16 compiled for one H200."""
    mesh = hfjax.make_mesh(devices=h200s(1))
    shape = {"vocab": 1024, "length": LENGTH, "layers": layers, "heads": 8, "embed": EMBED}
    config = GPTConfig(**shape, attention=partial(dot_product, implementation="xla"))
    init = lambda rngs: GPT(config, rngs=rngs)
    layout = hfjax.layout(init, optax.adamw(1e-3), mesh, DDP | HOST_PARAMETERS)
    options = {"remat": "full", "precision": "bf16", "optimizer_in_backward": in_backward}
    step = hfjax.train_step(layout, next_token_loss, compiler_options=OPTIMIZED, **options)
    return step.lower({"tokens": jax.ShapeDtypeStruct((1, LENGTH + 1), jnp.int32)}).compile()


DONE = r".*-done[\w.]* = f32\[([\d,]+)\].*\(%?(dynamic-slice-start[\w.]*)\)"


def under_matmuls(text):
    """Of each loop with matmuls the share of bytes from the host that arrive after one."""
    shares = []
    for body in re.split(r"\n}\n", text):
        name = re.search(r"^(ENTRY )?%?[\w.\-]+ \(", body, re.MULTILINE)
        flying, hidden, total, matmuls = {}, 0, 0, 0
        for line in body.split("\n"):
            if re.match(r"\s+%?gemm_fusion|.*__cublas", line):
                flying, matmuls = dict.fromkeys(flying, True), matmuls + 1
            elif start := re.match(r"\s+%?(dynamic-slice-start[\w.]*) = .*S\(5\)", line):
                flying[start[1]] = False
            elif end := re.match(DONE, line):
                size = 4 * math.prod(map(int, end[1].split(",")))
                total, hidden = total + size, hidden + size * flying.pop(end[2], False)
        if name and not name[1] and total > LAYER / 2 and matmuls:
            shares.append(hidden / total)
    return shares


@pytest.mark.cuda
@pytest.mark.parametrize("in_backward", [False, True], ids=["ordinary", "in backward"])
def test_a_device_holds_two_layers_and_fetches_under_matmuls(in_backward):
    """Beside them a gradient and its update; the ordinary step holds all layers' gradients."""
    four, eight = (compiled(n, in_backward) for n in (4, 8))
    small, large = four.memory_analysis(), eight.memory_analysis()
    assert small is not None
    assert large is not None
    growth = (large.temp_size_in_bytes - small.temp_size_in_bytes) / 4
    gradients = 0 if in_backward else LAYER
    assert growth - gradients <= 0.25 * LAYER
    assert small.temp_size_in_bytes - 4 * gradients <= 6 * LAYER
    assert small.host_temp_size_in_bytes == 0
    assert small.host_alias_size_in_bytes == small.host_argument_size_in_bytes >= 4 * LAYER
    forward, backward = under_matmuls(eight.as_text())
    assert min(forward, backward) > 0.99


class Numbered(Bent):
    def __call__(self, stream):
        x, documents = stream
        return super().__call__(x) * (1 + documents[:, None]), documents


class Stream(Stack):
    """Layers that are handed whole numbers beside the activations, as those of a GPT are."""

    def __init__(self, *, rngs):
        super().__init__(1, rngs=rngs)
        self.layers = stack_layers(LAYERS, lambda rngs: Numbered(rngs=rngs), rngs)

    def embed(self, batch):
        return super().embed(batch), batch["documents"]

    def head(self, x):
        return super().head(x[0])


def of_gpt(strategy):
    documents = np.repeat(np.arange(5), 5)[None].repeat(16, 0).astype(np.int32)
    layout = gpt_layout(strategy, {"fsdp": 2}, devices=jax.devices()[:2])
    return layout, next_token_loss, tokens(documents=documents)


def of_stack(strategy):
    mesh = hfjax.make_mesh(devices=jax.devices()[:2], fsdp=2)
    init = lambda rngs: Stream(rngs=rngs)
    layout = hfjax.layout(init, ADAMW, mesh, strategy.edit(replicate_below=0))
    return layout, squared, rows(documents=np.arange(8, dtype=np.int32) // 3)


IN_BACKWARD = (FSDP, {"optimizer_in_backward": True})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "strategy", "options"),
    [
        (of_stack, FSDP | HOST_PARAMETERS, {}),
        (of_stack, *IN_BACKWARD),
        pytest.param(of_gpt, FSDP | HOST_PARAMETERS, {}, marks=pytest.mark.slow),
        pytest.param(of_gpt, *IN_BACKWARD, marks=pytest.mark.slow),
    ],
    ids=["on the host", "in backward", "a GPT on the host", "a GPT in backward"],
)
def test_documents_travel_beside_the_activations_of_layers(of, strategy, options):
    losses = []
    for chosen, execution in ((FSDP, {}), (strategy, options)):
        layout, loss, batch = of(chosen)
        step = hfjax.train_step(layout, loss, **execution)
        state, _ = step(hfjax.init(layout), batch)
        losses.append(float(step(state, batch)[1]["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
