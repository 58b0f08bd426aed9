"""examples/step_by_hand.py has the losses of hfjax's step, and sends what it sends, to the byte."""

import runpy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import hfjax
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from hfjax.parallel.strategy import FSDP, TENSOR
from tests.h200 import OPTIMIZED, h200s

EXAMPLE = Path(__file__).parents[1] / "examples/step_by_hand.py"
PATHS = {  # the example's names, hfjax's paths
    "tokens": "tokens",
    "positions": "positions",
    "layers/norm1_scale": "layers/norm1/scale",
    "layers/norm1_bias": "layers/norm1/bias",
    "layers/qkv": "layers/attention/qkv/kernel",
    "layers/qkv_bias": "layers/attention/qkv/bias",
    "layers/out": "layers/attention/out/kernel",
    "layers/out_bias": "layers/attention/out/bias",
    "layers/norm2_scale": "layers/norm2/scale",
    "layers/norm2_bias": "layers/norm2/bias",
    "layers/up": "layers/mlp/up/kernel",
    "layers/up_bias": "layers/mlp/up/bias",
    "layers/down": "layers/mlp/down/kernel",
    "layers/down_bias": "layers/mlp/down/bias",
    "norm_scale": "norm/scale",
    "norm_bias": "norm/bias",
}
CASES = {
    "FSDP": (FSDP, 8, 1),
    "TENSOR": (TENSOR, 1, 8),
    "FSDP|TENSOR": (FSDP | TENSOR, 2, 4),
}


@pytest.fixture(scope="module")
def example():
    """Return the names of the example, which is no module of a package."""
    with jax.numpy_rank_promotion("allow"):
        yield SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


def mesh_of(fsdp, tensor, devices=None):
    return jax.make_mesh((fsdp, tensor), ("fsdp", "tensor"), devices=devices)


def hfjax_step(example, case, devices=None):
    """Return hfjax's layout and step of the example's model."""
    strategy, fsdp, tensor = CASES[case]
    config = GPTConfig(example.V, example.S, example.L, example.H, example.D)
    mesh = hfjax.make_mesh(devices=devices, fsdp=fsdp, tensor=tensor)
    strategy = strategy.edit(replicate_below=1024)  # norms and biases are smaller
    layout = hfjax.layout(lambda rngs: GPT(config, rngs=rngs), example.ADAMW, mesh, strategy)
    step = hfjax.train_step(layout, next_token_loss, max_grad_norm=example.MAX_GRAD_NORM)
    return layout, step


def lowered_by_hand(example, case, devices=None):
    mesh = mesh_of(*CASES[case][1:], devices)
    like = lambda x, spec: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
    )
    state = jax.tree.map(like, example.init_state(), example.state_specs())
    return example.train_step(mesh).lower(state, like(example.batch(0), P("fsdp")))


def theory(example, fsdp, tensor):
    """Return the bytes that a step by hand sends, by kind and axes."""
    shape = SimpleNamespace(**{name: getattr(example, name) for name in "BSDHKFVL"})
    b, s, d, layers = shape.B // fsdp, shape.S, shape.D, shape.L
    in_layers = layers * (4 * d * shape.H * shape.K + 2 * d * shape.F) // tensor
    ends = shape.V * d // tensor + s * d
    small = layers * (6 * d + (3 * shape.H * shape.K + shape.F) // tensor) + 2 * d
    numbers: dict[tuple[str, tuple[str, ...]], int] = {
        ("all-gather", ("fsdp",)): 2 * in_layers + ends,
        ("reduce-scatter", ("fsdp",)): in_layers + ends,
        ("all-reduce", ("fsdp",)): small + 1,  # and the loss
        ("all-reduce", ("tensor",)): b * s * ((4 * layers + 2) * d + 3),
    }
    present = [axis for axis, size in (("fsdp", fsdp), ("tensor", tensor)) if size > 1]
    found = Counter({key: 4 * n for key, n in numbers.items() if key[1][0] in present})
    found["all-reduce", tuple(present)] += 4  # the norm
    return found


def more_of_hfjax(layout, fsdp, tensor):
    """Return what hfjax sends more: the bytes of a few numbers.

    It keeps the sum of squares of each gradient (`Gradients.squares`), so it all-reduces each over
    the axes that shard it; by hand all are added first, and one number is sent. And the loss has a
    weight, since a mask may leave out tokens.
    """
    sizes = {"fsdp": fsdp, "tensor": tensor}
    active = lambda axes: tuple(axis for axis in sizes if axis in axes and sizes[axis] > 1)
    squares = Counter(active(p.optimizer_state) for p in layout.param_specs.values())
    del squares[()]
    squares[active(sizes)] -= 1
    squares[active(["fsdp"])] += 1
    return Counter({("all-reduce", axes): 4 * n for axes, n in squares.items() if axes})


def by_axes(found):
    """Return the bytes of a program, by kind and axes."""
    total = Counter()
    for row in found:
        total[row.kind, row.axes] += row.bytes * row.count
    return total


def calls(found):
    """Return how often each array is gathered or scattered: {(kind, axes, bytes): count}."""
    counts = Counter()
    for row in found:
        if row.kind in ("all-gather", "reduce-scatter"):
            counts[row.kind, row.axes, row.bytes] += row.count
    return counts


@pytest.mark.parametrize("case", CASES)
@pytest.mark.short("FSDP", "FSDP|TENSOR")
def test_its_losses_are_those_of_hfjax(example, case):
    layout, step = hfjax_step(example, case)
    params, _ = example.init_state()
    state = hfjax.init(layout, parameters={PATHS[name]: x for name, x in params.items()})
    losses = []
    for number in range(6):
        state, metrics = step(state, {"tokens": example.batch(number)})
        losses.append(float(metrics["loss"]))
    by_hand = example.train(mesh_of(*CASES[case][1:]), 6)
    np.testing.assert_allclose(by_hand, losses, rtol=1e-6)
    assert losses[-1] < losses[0] - 0.5


def test_fsdp_as_it_is_written_sends_the_same_arrays(example):
    by_hand = hfjax.collectives(lowered_by_hand(example, "FSDP"))
    _, step = hfjax_step(example, "FSDP")
    found = hfjax.collectives(step.lower({"tokens": example.batch(0)}))
    assert calls(by_hand) == calls(found)
    assert by_axes(by_hand) == theory(example, 8, 1)
    # The text does not have hfjax's norm, which the partitioner sums; but it has a weight.
    assert by_axes(found) == theory(example, 8, 1)


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES)
@pytest.mark.short("FSDP|TENSOR")
def test_on_h200s_it_sends_what_theory_says_and_hfjax_some_numbers_more(example, case):
    sizes, devices = CASES[case][1:], h200s()
    by_hand = hfjax.collectives(lowered_by_hand(example, case, devices).compile(OPTIMIZED))
    assert by_axes(by_hand) == theory(example, *sizes)
    layout, step = hfjax_step(example, case, devices)
    found = hfjax.collectives(step.lower({"tokens": example.batch(0)}).compile(OPTIMIZED))
    assert calls(found) == calls(by_hand)
    assert by_axes(found) == theory(example, *sizes) + more_of_hfjax(layout, *sizes)


def test_a_program_that_omits_a_sum_is_refused(example, monkeypatch):
    monkeypatch.setitem(example.layer.__globals__, "reduce_from_tensor", lambda x: x)
    with pytest.raises((TypeError, ValueError), match="varying"):
        lowered_by_hand(example, "TENSOR")


def test_the_program_prints_equal_losses_under_every_mesh(example, capsys):
    example.main(10)
    lines = capsys.readouterr().out.splitlines()
    meshes, losses = zip(*(line.split(": ") for line in lines), strict=True)
    assert meshes == ("fsdp=8 tensor=1", "fsdp=1 tensor=8", "fsdp=2 tensor=4")
    assert len(set(losses)) == 1
