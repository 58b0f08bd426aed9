"""Layers that run on parts of the rows train as on all rows, and their parameters come once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.models.gpt import GPT, Block, GPTConfig, next_token_loss
from hfjax.models.parts import stacked
from hfjax.testing import assert_strategies_agree


def gpt(**changes):
    shape = {"vocab": 32, "length": 8, "layers": 2, "embed": 32, "heads": 4, "dropout": 0.1}
    return lambda rngs: GPT(GPTConfig.tiny(**shape | changes), rngs=rngs)


def tokens(rows=16, length=8, **more):
    drawn = np.random.default_rng(0).integers(0, 32, (rows, length + 1))
    return {"tokens": drawn.astype(np.int32), **more}


TWO = {"split_rows": 2}
BOTH = hfjax.TENSOR | hfjax.SEQUENCE
CASES = {
    "TENSOR|SEQUENCE": (BOTH, {"data": 2, "tensor": 4}, TWO),
    "FSDP|TENSOR, remat": (hfjax.FSDP | BOTH, {"fsdp": 2, "tensor": 2}, TWO | {"remat": "full"}),
    "microbatches": (hfjax.FSDP, {"fsdp": 2}, {"split_rows": 4, "accumulate": 2}),
    "a grid": (hfjax.GRID, {"row": 2, "tensor": 2}, TWO),
    "offload": (hfjax.TENSOR, {"tensor": 2}, TWO | {"offload": 0.5}),
}


def test_it_trains_as_one_device_masks_and_documents_too():
    documents = np.sort(np.random.default_rng(1).integers(0, 3, (16, 9))).astype(np.int32)
    cases = {name: (s.edit(replicate_below=0), *rest) for name, (s, *rest) in CASES.items()}
    with jax.enable_x64(True):
        found = assert_strategies_agree(
            gpt(), next_token_loss, tokens(documents=documents), cases, precision="fp64", steps=2
        )
    assert max(found.values()) < 1e-9, found


def lowered(split_rows, batch, **options):
    mesh = hfjax.make_mesh(fsdp=4, tensor=2)
    strategy = (hfjax.FSDP | BOTH).edit(replicate_below=0)
    plan = hfjax.layout(gpt(), optax.sgd(0.1), mesh, strategy)
    run = {"split_rows": split_rows, "unroll": 1, **options}
    return hfjax.train_step(plan, next_token_loss, **run).lower(batch)


def test_parameters_are_gathered_and_gradients_scattered_once():
    found = [hfjax.collectives(lowered(n, tokens())) for n in (1, 2, 4)]
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        sent = {counted.total(kind, "fsdp") for counted in found}
        assert len(sent) == 1, kind
    assert found[0].total("all-gather", "fsdp") > 0


def test_the_collectives_over_tensor_are_as_many_bytes_of_smaller_parts():
    """The partitioner's own: gradients of norms and of biases in the stream come in parts, too."""
    one, two = (hfjax.collectives(lowered(n, tokens()).compile()) for n in (1, 2))
    twice = 2 * 6 * 32 * 4  # layers, arrays, width, bytes
    assert one.total(axes="tensor") == two.total(axes="tensor") - twice > 0
    assert one.total(axes="fsdp") == two.total(axes="fsdp")


def test_layers_of_a_list_and_functions_run_on_parts_too():
    class Listed(GPT):
        def __init__(self, *, rngs):
            super().__init__(gpt()(rngs).config, rngs=rngs)
            blocks = [Block(self.config, rngs=rngs) for _ in range(2)]
            self.layers = nnx.Sequential(blocks[0], jnp.tanh, blocks[1])

    cases = {"FSDP": (hfjax.FSDP, {"fsdp": 2}, TWO | {"remat": "every:2"})}
    found = assert_strategies_agree(
        lambda rngs: Listed(rngs=rngs), next_token_loss, tokens(), cases, steps=1
    )
    assert max(found.values()) < 1e-5


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
        super().__init__(gpt()(rngs).config, rngs=rngs)
        self.layers = stacked(2, Sum, rngs)

    def embed(self, batch):
        return super().embed(batch), jnp.zeros(())

    def head(self, stream):
        return super().head(stream[0])


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match=r"has 3 rows in a microbatch, .*: \[3\] would do"):
        lowered(2, tokens(rows=12))
    with pytest.raises(ValueError, match=r"has 1 rows in a microbatch, .*: leave it out"):
        lowered(2, tokens(rows=4))
    plan = hfjax.layout(
        lambda rngs: Told(rngs=rngs), optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP
    )
    step = hfjax.train_step(plan, next_token_loss, split_rows=2)
    with pytest.raises(ValueError, match=r"is not all of rows: \[2, 8, 32\], \[\]"):
        step.lower(tokens())
    given: Any
    for given in (0, True, 1.5):
        with pytest.raises(ValueError, match=f"split_rows={given}: a positive number of parts"):
            hfjax.Execution(split_rows=given)
