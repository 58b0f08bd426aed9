"""Adapters: a step equals plain JAX under every strategy, and moves and keeps only theirs."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.models.gpt import next_token_loss
from hfjax.models.llama import Llama, LlamaConfig
from hfjax.utils.paths import flatten

SIZES: Any = {"vocab": 64, "layers": 2, "heads": 4, "embed": 32}
LLAMA = LlamaConfig(**SIZES, length=16, kv_heads=2, mlp=48)
BATCH: Any = {"tokens": np.random.default_rng(0).integers(0, 64, (8, 17), np.int32)}
OPTIMIZER = optax.adam(1e-2)


def llama(rngs: nnx.Rngs) -> Llama:
    """Return a small Llama."""
    return Llama(LLAMA, rngs=rngs)


def adapted(**options: Any) -> Any:
    """Return the small Llama with adapters of unlike ranks."""
    options = {"rank": 3, "alpha": 6.0, "rank_pattern": {"v": 2}, **options}
    return hfjax.adapters.lora(llama, **options)


def run(model: Any, strategy: Any, mesh: dict, steps: int = 3, **execution: Any) -> tuple:
    """Return the layout, the losses of some steps and the state."""
    devices = jax.devices()[: math.prod(mesh.values())]
    layout = hfjax.layout(model, OPTIMIZER, hfjax.make_mesh(devices=devices, **mesh), strategy)
    state = hfjax.init(layout, 0, execution.get("schedule"))
    step, losses = hfjax.train_step(layout, next_token_loss, **execution), []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return layout, losses, state


@pytest.fixture(scope="module")
def by_hand():
    """Losses and adapters of plain JAX, where each adapter is added to its kernel."""
    lora = adapted()
    layout = hfjax.layout(lora, OPTIMIZER, hfjax.make_mesh(devices=jax.devices()[:1]), hfjax.DDP)
    params = flatten(jax.tree.map(np.asarray, hfjax.init(layout, 0).params))
    base = {path: x for path, x in params.items() if "/lora/" not in path}
    low_rank = {path: x for path, x in params.items() if "/lora/" in path}
    graph, state = nnx.split(nnx.eval_shape(lambda: llama(nnx.Rngs(0))))
    starts = {"q": (2, 0, 2), "k": (2, 2, 3), "v": (2, 3, 4), "gate": (2, 0, 1), "up": (2, 1, 2)}

    def merged(low_rank: dict) -> dict:
        kernels = {path: jnp.asarray(x) for path, x in base.items()}
        for a_path in (path for path in low_rank if path.endswith("/a")):
            a, b = low_rank[a_path], low_rank[f"{a_path[:-2]}/b"]
            scale = 6.0 / a.shape[-1]
            change = scale * jax.vmap(lambda a, b: jnp.tensordot(a, b, 1))(a, b)
            module, _, part = a_path[:-2].partition("/lora")
            kernel, part = f"{module}/kernel", part.strip("/")
            if not part:
                kernels[kernel] = kernels[kernel] + change
                continue
            dim, start, stop = starts[part]
            index = (*[slice(None)] * (dim + 1), slice(start, stop))
            kernels[kernel] = kernels[kernel].at[index].add(change)
        return kernels

    def loss(low_rank: dict) -> jax.Array:
        flat = dict(nnx.to_flat_state(state))
        kernels = merged(low_rank)
        full = {keys: v.replace(kernels["/".join(map(str, keys))]) for keys, v in flat.items()}
        mean = next_token_loss(nnx.merge(graph, nnx.from_flat_state(full))(BATCH), BATCH)
        return mean.total / mean.weight

    optimizer_state, losses = OPTIMIZER.init(low_rank), []
    for _ in range(3):
        value, gradients = jax.value_and_grad(loss)(low_rank)
        updates, optimizer_state = OPTIMIZER.update(gradients, optimizer_state)
        low_rank = optax.apply_updates(low_rank, updates)
        losses.append(float(value))
    return losses, low_rank


STRATEGIES: Any = {
    "one device": (hfjax.DDP, {"data": 1}, {}),
    "DDP, accumulated": (hfjax.DDP, {"data": 4}, {"gradient_accumulation_steps": 2}),
    "FSDP, remat": (hfjax.FSDP.edit(replicate_below=0), {"fsdp": 8}, {"remat": "full"}),
    "TENSOR and SEQUENCE": (hfjax.TENSOR | hfjax.SEQUENCE, {"data": 2, "tensor": 2}, {}),
    "PIPE": (hfjax.PIPE, {"pipe": 2}, {"schedule": hfjax.Schedule("1f1b", 4)}),
    "zero bubble": (hfjax.PIPE, {"pipe": 2}, {"schedule": hfjax.Schedule("zb-h1", 4)}),
    "GRID": (hfjax.GRID, {"row": 2, "tensor": 2}, {}),
    "CONTEXT": (hfjax.CONTEXT, {"context": 2}, {}),
    "HOST_PARAMETERS": (hfjax.FSDP | hfjax.HOST_PARAMETERS, {"fsdp": 2}, {}),
}


SLOW = ("DDP, accumulated", "zero bubble", "GRID", "CONTEXT", "HOST_PARAMETERS")
mark = lambda name: pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name


@pytest.mark.parametrize("name", map(mark, STRATEGIES))
def test_a_step_equals_plain_jax_under_every_strategy(name, by_hand):
    strategy, mesh, execution = STRATEGIES[name]
    losses, low_rank = by_hand
    layout, own_losses, state = run(adapted(), strategy, mesh, **execution)
    np.testing.assert_allclose(own_losses, losses, rtol=2e-6)
    params = flatten(hfjax.full_array(state).params)
    order = np.argsort(np.asarray(state.order)) if state.order is not None else slice(None)
    for path, x in low_rank.items():
        np.testing.assert_allclose(np.asarray(params[path])[order], x, rtol=2e-3, atol=2e-5)
    assert {*layout.gradient_bytes} == {*low_rank}


def test_the_base_has_no_gradient_no_optimizer_state_and_does_not_change():
    layout, _, state = run(adapted(), hfjax.FSDP.edit(replicate_below=0), {"fsdp": 8})
    fresh = flatten(hfjax.init(layout, 0).params)
    params = flatten(state.params)
    base = [path for path in params if "/lora" not in path]
    assert base
    assert all(np.array_equal(params[path], fresh[path]) for path in base)
    sizes = [math.prod(a.shape) for path, a in layout.arrays.items() if "/lora" in path]
    assert 8 * sum(layout.gradient_bytes.values()) == 4 * sum(sizes)
    moments = [x for x in jax.tree.leaves(state.optimizer) if x.ndim]
    assert sum(x.size for x in moments) == 2 * sum(sizes)


def sent(model: Any, strategy: Any, mesh: dict, **execution: Any) -> Any:
    """Return the collectives of a compiled step."""
    devices = jax.devices()[: math.prod(mesh.values())]
    layout = hfjax.layout(model, OPTIMIZER, hfjax.make_mesh(devices=devices, **mesh), strategy)
    step = hfjax.train_step(layout, next_token_loss, **execution)
    shapes = {"tokens": jax.ShapeDtypeStruct((8, 17), jnp.int32)}
    return hfjax.collectives(step.lower(shapes).compile())


def test_fsdp_reduces_the_gradients_of_adapters_alone_for_each_microbatch():
    fsdp, lora = hfjax.FSDP.edit(replicate_below=0), adapted()
    found = sent(lora, fsdp, {"fsdp": 4}, gradient_accumulation_steps=2)
    sizes = [a.rank * sum(a.map.sizes) * LLAMA.layers for a in lora.adapters]
    assert found.total("reduce-scatter") == 2 * 4 * sum(sizes)


def test_tensor_parallelism_sends_ranks_in_place_of_activations():
    tensor, mesh = hfjax.TENSOR | hfjax.SEQUENCE, {"tensor": 2}
    plain, low_rank = sent(llama, tensor, mesh), sent(adapted(), tensor, mesh)
    activation = 4 * 8 * 16 * LLAMA.embed
    is_large = lambda row: row.bytes >= activation
    count = lambda found: sum(row.count for row in found if is_large(row))
    assert count(low_rank) == count(plain) - 2  # no gradient of the embedding, nor of the head
    assert low_rank.count("all-to-all") == 0
