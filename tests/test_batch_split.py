"""Layers that run on parts of the rows train as on all rows, and their parameters come once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from hfjax.models.layers import stack_layers
from hfjax.testing import assert_strategies_agree
from tests import small_gpt


def tokens(rows=16, length=24, **more):
    return small_gpt.tokens(rows, length, **more)


TWO = {"tensor_overlap_chunks": 2}
BOTH = hfjax.TENSOR | hfjax.SEQUENCE
CASES = {
    "FSDP|TENSOR, remat": (hfjax.FSDP | BOTH, {"fsdp": 2, "tensor": 2}, TWO | {"remat": "full"}),
    "microbatches": (
        hfjax.FSDP,
        {"fsdp": 2},
        {"tensor_overlap_chunks": 4, "gradient_accumulation_steps": 2},
    ),
}
MORE = {
    "TENSOR|SEQUENCE": (BOTH, {"data": 2, "tensor": 4}, TWO),
    "a grid": (hfjax.GRID, {"row": 2, "tensor": 2}, TWO),
    "offload": (hfjax.TENSOR, {"tensor": 2}, TWO | {"offload": 0.5}),
}


def agree(model, given, cases):
    cases = {name: (s.edit(replicate_below=0), *rest) for name, (s, *rest) in cases.items()}
    with jax.enable_x64(True):
        found = assert_strategies_agree(
            model, next_token_loss, given, cases, precision="fp64", unroll=1, steps=2
        )
    assert max(found.values()) < 1e-9, found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_one_device_masks_and_microbatches_too(name):
    agree(small_gpt.mlps(dropout=0.1), tokens(), {name: CASES[name]})


@pytest.mark.slow
def test_rows_that_devices_share_are_cut_where_the_width_is_a_multiple_of_them_too():
    """8 rows on a device, of positions that two devices share, and a width of 32."""
    case = hfjax.DDP | hfjax.CONTEXT, {"data": 2, "context": 2}, TWO
    agree(small_gpt.gpt(dropout=0.1), tokens(), {"CONTEXT": case})


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"row": 2, "tensor": 2}, {"data": 2, "row": 2, "tensor": 2}])
def test_a_grid_deals_the_rows_of_each_part(sizes):
    """Parts of as many rows as there are positions, and masks of both."""
    given = tokens(rows=16, length=8)
    agree(small_gpt.gpt(dropout=0.1), given, {"GRID": (hfjax.GRID, sizes, TWO)})


@pytest.mark.slow
def test_whole_models_with_documents_train_as_one_device():
    documents = np.sort(np.random.default_rng(1).integers(0, 3, (16, 25))).astype(np.int32)
    agree(small_gpt.gpt(dropout=0.1), tokens(documents=documents), CASES | MORE)


def lowered(tensor_overlap_chunks, batch, **options):
    mesh = hfjax.make_mesh(fsdp=4, tensor=2)
    strategy = (hfjax.FSDP | BOTH).edit(replicate_below=0)
    plan = hfjax.layout(small_gpt.mlps(), optax.sgd(0.1), mesh, strategy)
    run = {"tensor_overlap_chunks": tensor_overlap_chunks, "unroll": 1, **options}
    return hfjax.train_step(plan, next_token_loss, **run).lower(batch)


@functools.cache
def in_parts(tensor_overlap_chunks):
    return lowered(tensor_overlap_chunks, tokens())


def test_parameters_are_gathered_and_gradients_scattered_once():
    found = [hfjax.collectives(in_parts(n)) for n in (1, 2, 4)]
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        sent = {counted.total(kind, "fsdp") for counted in found}
        assert len(sent) == 1, kind
    assert found[0].total("all-gather", "fsdp") > 0


def test_the_collectives_over_tensor_are_as_many_bytes_of_smaller_parts():
    """The partitioner's own: gradients of biases in the stream come in parts, too."""
    one, two = (hfjax.collectives(in_parts(n).compile()) for n in (1, 2))
    twice = 2 * 32 * 4  # layers, width, bytes: of a bias; these layers have no norms
    assert one.total(axes="tensor") == two.total(axes="tensor") - twice > 0
    assert one.total(axes="fsdp") == two.total(axes="fsdp")


@pytest.mark.slow
def test_layers_of_a_list_and_functions_run_on_parts_too():
    class Listed(GPT):
        def __init__(self, *, rngs):
            super().__init__(GPTConfig.tiny(**small_gpt.SHAPE), rngs=rngs)
            first, last = (small_gpt.OnlyMLP(self.config, rngs=rngs) for _ in range(2))
            self.layers = nnx.Sequential(first, jnp.tanh, last)

        def __call__(self, batch):
            return self.head(self.layers(self.embed(batch)))

    cases = {"FSDP": (hfjax.FSDP, {"fsdp": 2}, TWO | {"remat": "every:2"})}
    agree(lambda rngs: Listed(rngs=rngs), tokens(), cases)


class Sum(nnx.Module):
    """A layer that hands on something which has no rows."""

    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones(32), axes=("embed",))

    def __call__(self, x):
        x, total = x
        return x * self.w[...][None, None], total + x.sum()


class Told(GPT):
    """A model whose layers hand on a sum."""

    def __init__(self, *, rngs):
        super().__init__(GPTConfig.tiny(**small_gpt.SHAPE), rngs=rngs)
        self.layers = stack_layers(2, Sum, rngs)

    def embed(self, batch):
        return super().embed(batch), jnp.zeros(())

    def head(self, stream):
        return super().head(stream[0])


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match=r"has 3 examples in a microbatch, .*: \[3\] would do"):
        lowered(2, tokens(rows=12))
    with pytest.raises(ValueError, match=r"has 1 examples in a microbatch, .*: leave it out"):
        lowered(2, tokens(rows=4))
    plan = hfjax.layout(
        lambda rngs: Told(rngs=rngs), optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP
    )
    step = hfjax.train_step(plan, next_token_loss, tensor_overlap_chunks=2)
    with pytest.raises(
        ValueError, match=r"is not split by examples: \[\] where a device has 2 examples"
    ):
        step.lower(tokens())
    given: Any
    for given in (0, True, 1.5):
        with pytest.raises(
            ValueError, match=f"tensor_overlap_chunks={given}: a positive number of chunks"
        ):
            hfjax.Execution(tensor_overlap_chunks=given)


class PositionsFirst(GPT):
    """A model whose layers are given [positions, rows, width]."""

    def __init__(self, *, rngs):
        super().__init__(GPTConfig.tiny(**small_gpt.SHAPE), rngs=rngs)
        self.layers = stack_layers(2, lambda rngs: small_gpt.OnlyMLP(self.config, rngs=rngs), rngs)

    def embed(self, batch):
        return super().embed(batch).swapaxes(0, 1)

    def head(self, stream):
        return super().head(stream.swapaxes(0, 1))


class HardCoded(PositionsFirst):
    def embed(self, batch):
        return super().embed(batch).reshape(8, 8, 32)


class Merged(PositionsFirst):
    """[positions, rows and heads, width of a head]."""

    def embed(self, batch):
        stream = super().embed(batch)
        return stream.reshape(stream.shape[0], -1, 4)


class Turning(nnx.Module):
    """A layer that returns positions first."""

    def __init__(self, *, rngs):
        self.map = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x):
        return self.map(x).swapaxes(0, 1)


class TurnedAtTheEnd(PositionsFirst):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.layers = nnx.List([Turning(rngs=rngs)])

    def embed(self, batch):
        return super().embed(batch).swapaxes(0, 1)


def lowered_step(model, batch):
    mesh = hfjax.make_mesh(devices=jax.devices()[:1])
    plan = hfjax.layout(lambda rngs: model(rngs=rngs), optax.sgd(0.1), mesh, hfjax.DDP)
    return hfjax.train_step(plan, next_token_loss, tensor_overlap_chunks=2).lower(batch)


def test_a_stream_that_does_not_begin_with_the_rows_is_refused():
    with pytest.raises(ValueError, match=r"\[24, 16, 32\] where a device has 16 examples"):
        lowered_step(PositionsFirst, tokens())
    with pytest.raises(
        ValueError, match=r"split by examples: \[24, 8, 32\] where .* part has 8 examples"
    ):
        lowered_step(TurnedAtTheEnd, tokens())


def test_also_where_there_are_as_many_positions_as_rows():
    with pytest.raises(
        ValueError, match=r"and of 4 to tell .*: \[8, 4, 32\] where .* has 4 examples"
    ):
        lowered_step(PositionsFirst, tokens(rows=8, length=8))
    with pytest.raises(
        ValueError,
        match=r"\[8, 8, 32\] have this size, or a multiple, twice, and embed of 4 examples",
    ):
        lowered_step(HardCoded, tokens(rows=8, length=8))


def test_also_where_rows_are_part_of_another_dimension():
    with pytest.raises(
        ValueError, match=r"and of 4 to tell .*: \[8, 32, 4\] where .* has 4 examples"
    ):
        lowered_step(Merged, tokens(rows=8, length=8))


def test_as_many_rows_as_positions_or_as_the_width_are_no_fault():
    for rows, length in ((8, 8), (32, 8)):
        lowered_step(
            lambda rngs: small_gpt.mlps(dropout=0.1)(rngs), tokens(rows=rows, length=length)
        )


class PerExample(nnx.Module):
    """A layer that divides by the number of examples, or subtracts their mean."""

    def __init__(self, *, rngs, subtracts_mean=False):
        self.map, self.subtracts_mean = nnx.Linear(4, 4, rngs=rngs), subtracts_mean

    def __call__(self, x):
        y = self.map(x)
        return (
            y - y.mean(0, keepdims=True)
            if self.subtracts_mean
            else jnp.tanh(y) + 8 * x / x.shape[0]
        )


class PerExampleModel(nnx.Module):
    def __init__(self, *, rngs, **options):
        self.layers = stack_layers(2, lambda rngs: PerExample(rngs=rngs, **options), rngs)

    def embed(self, batch):
        return batch["x"]

    def head(self, x):
        return x


def squares(outputs, batch):
    return ((outputs - batch["y"]) ** 2).mean()


NUMBERS = dict(zip("xy", np.random.default_rng(0).normal(size=(2, 16, 4)), strict=True))
MLP = {"layers/map/kernel": ("layers", None, "mlp")}


def test_a_layer_reads_the_number_of_examples_in_a_microbatch():
    cases = {
        "DDP": (hfjax.DDP, {"data": 4}, TWO),
        "TENSOR": (hfjax.TENSOR, {"tensor": 2}, TWO),
        "local": (hfjax.TENSOR, {"data": 1, "tensor": 2}, TWO | {"batch_view": "local"}),
    }
    model = lambda rngs: PerExampleModel(rngs=rngs)
    options: Any = {"gradient_accumulation_steps": 2}
    with jax.enable_x64(True):
        assert_strategies_agree(
            model, squares, NUMBERS, cases, precision="fp64", axes=MLP, **options
        )


@pytest.mark.parametrize("sizes", [{"data": 2}, {"tensor": 2}])
def test_a_layer_that_takes_a_mean_over_examples_is_refused(sizes):
    model = lambda rngs: PerExampleModel(rngs=rngs, subtracts_mean=True)
    mesh = hfjax.make_mesh(devices=jax.devices()[:2], **sizes)
    strategy = hfjax.TENSOR if "tensor" in sizes else hfjax.DDP
    layout = hfjax.layout(model, optax.sgd(0.1), mesh, strategy, axes=MLP)
    step = hfjax.train_step(layout, squares, **TWO)
    with pytest.raises(ValueError, match=r"chunks=2: .*__call__.*: sub: a layer mixes examples"):
        step.lower(NUMBERS)
