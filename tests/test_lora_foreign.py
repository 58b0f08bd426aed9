"""Adapters of any model: a step equals plain JAX with W + s A B in place of W."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import hfjax
from hfjax.models.gpt import GPT, GPTConfig
from hfjax.models.layers import stack_layers
from hfjax.utils.paths import flatten, nest

RNG = np.random.default_rng(0)
IMAGES = RNG.standard_normal((16, 4, 8), np.float32)  # examples, patches, pixels
ROWS = RNG.standard_normal((16, 8), np.float32)
OPTIMIZER = optax.adam(1e-2, eps=1e-4)
WHOLE: Any = lambda model, batch: model(batch)


def squares(outputs: jax.Array, batch: jax.Array) -> jax.Array:
    """Return the mean square of the outputs' distance from 1."""
    return ((outputs - 1.0) ** 2).mean()


class Transformer(nnx.Module):
    """A block of a vision transformer, of nnx's own modules."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        named = lambda *names: nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
        self.patches = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            4, 16, decode=False, kernel_init=named(None, "heads", None), rngs=rngs,
            out_kernel_init=named("heads", None, None),
        )  # fmt: skip
        self.up = nnx.Linear(16, 32, kernel_init=named(None, "mlp"), rngs=rngs)
        self.down = nnx.Linear(32, 16, kernel_init=named("mlp", None), rngs=rngs)
        self.head = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images)
        x = x + self.attention(self.norm(x))
        x = x + self.down(nnx.gelu(self.up(self.norm(x))))
        return self.head(x.mean(1))


class Dense(linen.Module):
    """A Linen model of two layers and a norm."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.gelu(linen.Dense(32, name="up")(linen.LayerNorm()(x)))
        return linen.Dense(8, name="down")(x)


def tree(rngs: nnx.Rngs) -> dict:
    """Return a bare tree: a stack of layers, and a matrix whose outputs come first."""
    normal = lambda *shape: jax.random.normal(rngs.params(), shape) / 3
    layers = {"up": normal(2, 8, 32), "down": normal(2, 32, 8)}
    return {"layers": layers, "head": {"weight": normal(4, 8)}, "bias": jnp.zeros((1, 4))}


def apply_tree(params: dict, x: jax.Array) -> jax.Array:
    """Return the outputs of `tree`."""
    layer = lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None)
    x = jax.lax.scan(layer, x, params["layers"])[0]
    return x @ params["head"]["weight"].T + params["bias"]


@dataclass(frozen=True)
class Model:
    """A model, its adapters, and W + s A B written by hand."""

    init: Callable
    batch: Any
    options: Mapping[str, Any]
    sums: Mapping[str, tuple[str, float]]  # path -> (A B, s)
    forward: Callable | None = None
    names: Any = None  # `axes` of TENSOR

    @property
    def lora(self) -> Any:
        """The model with adapters."""
        return hfjax.adapters.lora(self.init, **self.options)

    def layout(self, strategy: Any = hfjax.DDP, axes: Any = None, **mesh: int) -> hfjax.Layout:
        """Return a layout of the model with adapters."""
        more = {"example": self.batch} if axes == "auto" else {}
        devices = jax.devices()[: int(np.prod([*mesh.values()], dtype=int))]
        new_mesh = hfjax.make_mesh(devices=devices, **mesh)
        return hfjax.layout(
            self.lora, OPTIMIZER, new_mesh, strategy, forward=self.forward, axes=axes, **more
        )


MODELS = {
    "nnx": Model(
        Transformer,
        IMAGES,
        {"rank": 3, "alpha": 6.0, "rank_pattern": {"up": 2},
         "targets": ["attention/query/kernel", "attention/out/kernel", "up", "down/*"]},
        {"attention/query/kernel": ("ir,rhd->ihd", 2.0),
         "attention/out/kernel": ("hdr,ro->hdo", 2.0), "up/kernel": ("ir,ro->io", 3.0),
         "down/kernel": ("ir,ro->io", 2.0)},
    ),
    "Linen": Model(
        lambda rngs: Dense().init(rngs.params(), ROWS),
        ROWS,
        {"rank": 4, "alpha": 8.0, "targets": ["*/kernel"], "use_rslora": True, "init": "gaussian"},
        {"params/up/kernel": ("ir,ro->io", 4.0), "params/down/kernel": ("ir,ro->io", 4.0)},
        lambda params, x: Dense().apply(params, x),
        "auto",
    ),
    "tree": Model(
        tree,
        ROWS,
        {"rank": 2, "targets": ["layers", "*/weight"], "dims": {"*/weight": "oi"},
         "modules_to_save": "bias"},
        {"layers/up": ("lir,lro->lio", 1.0), "layers/down": ("lir,lro->lio", 1.0),
         "head/weight": ("ir,ro->oi", 1.0)},
        apply_tree,
        {"*/up": ("layers", None, "mlp"), "*/down": ("layers", "mlp", None)},
    ),
}  # fmt: skip


def adapter_paths(path: str) -> list[str]:
    """Return the paths of A and B of a matrix."""
    *parents, name = path.split("/")
    return ["/".join([*parents, "lora", name, x]) for x in "ab"]


@pytest.fixture(scope="module")
def by_hand() -> Callable[[str], tuple]:
    """A function that trains a model in plain JAX: its losses, and what trains."""
    done: dict[str, tuple] = {}

    def train(name: str) -> tuple:
        model = MODELS[name]
        state = hfjax.init(model.layout(), 0)
        params = {path: jnp.asarray(x) for path, x in flatten(state.params).items()}
        low_rank = {p for path in model.sums for p in adapter_paths(path)}
        trained = {p: params.pop(p) for p in {*low_rank, *({"bias"} & params.keys())}}

        def loss(trained: dict) -> jax.Array:
            flat = params | {path: x for path, x in trained.items() if path not in low_rank}
            for path, (product, scale) in model.sums.items():
                a, b = (trained[p] for p in adapter_paths(path))
                flat[path] = flat[path] + scale * jnp.einsum(product, a, b)
            return squares(call(flat), model.batch)

        def call(flat: dict) -> jax.Array:
            if model.forward is not None:
                return model.forward(nest(flat), model.batch)
            with nnx.use_eager_sharding(False):
                graph, state = nnx.split(nnx.eval_shape(lambda: model.init(nnx.Rngs(0))))
            variables = dict(nnx.to_flat_state(state))
            paths = {keys: "/".join(map(str, keys)) for keys in variables}
            filled = {keys: v.replace(flat[paths[keys]]) for keys, v in variables.items()
                      if paths[keys] in flat}  # fmt: skip
            return nnx.merge(graph, nnx.from_flat_state(variables | filled))(model.batch)

        value_and_grad, losses = jax.jit(jax.value_and_grad(loss)), []
        optimizer_state = OPTIMIZER.init(trained)
        for _ in range(3):
            value, gradients = value_and_grad(trained)
            updates, optimizer_state = OPTIMIZER.update(gradients, optimizer_state)
            trained = optax.apply_updates(trained, updates)  # pyright: ignore[reportAssignmentType]
            losses.append(float(value))
        done[name] = losses, trained
        return done[name]

    return lambda name: done.get(name) or train(name)


STRATEGIES: Any = {
    "DDP": (hfjax.DDP, {"data": 8}),
    "FSDP": (hfjax.FSDP.edit(replicate_below=0), {"fsdp": 8}),
    "TENSOR": (hfjax.TENSOR, {"data": 2, "tensor": 4}),
}


@pytest.mark.short("Linen-FSDP", "tree-TENSOR")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_equals_plain_jax_with_w_plus_s_a_b(name, strategy, by_hand):
    model, (chosen, mesh) = MODELS[name], STRATEGIES[strategy]
    layout = model.layout(chosen, model.names if strategy == "TENSOR" else None, **mesh)
    state, losses = hfjax.init(layout, 0), []
    step = hfjax.train_step(layout, squares)
    base = {p: np.asarray(x) for p, x in flatten(state.params).items() if model.lora.is_frozen(p)}
    for _ in range(3):
        state, metrics = step(state, model.batch)
        losses.append(float(metrics["loss"]))
    expected_losses, trained = by_hand(name)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    params = flatten(hfjax.full_array(state).params)
    for path, x in trained.items():
        assert np.abs(x).max() > 1e-3
        np.testing.assert_allclose(params[path], x, rtol=1e-5, atol=2e-6)
    assert all(np.array_equal(params[path], x) for path, x in base.items())
    assert {*layout.gradient_bytes} == {*trained}
    moments = sum(x.size for x in jax.tree.leaves(state.optimizer) if x.ndim)
    assert moments == 2 * sum(x.size for x in trained.values())


def test_matrices_are_split_with_their_adapters():
    layout = MODELS["nnx"].layout(hfjax.TENSOR, data=2, tensor=4)
    own = {path: names for path, names in layout.axes.items() if "lora" in path}
    assert own == {
        "attention/query/lora/kernel/b": (None, "heads", None),
        "attention/out/lora/kernel/a": ("heads", None, None),
        "up/lora/kernel/b": (None, "mlp"),
        "down/lora/kernel/a": ("mlp", None),
    }
    again = MODELS["nnx"].layout(hfjax.TENSOR, layout.axes, data=2, tensor=4)
    assert again.specs == layout.specs
    wrong = layout.axes | {"up/lora/kernel/b": ("mlp", None)}
    with pytest.raises(
        ValueError, match="names of an adapter's dimensions follow from those of up"
    ):
        MODELS["nnx"].layout(hfjax.TENSOR, wrong, data=2, tensor=4)


def test_a_model_of_a_state_has_the_merged_matrices():
    model = MODELS["tree"]
    layout = model.layout()
    params = flatten(jax.tree.map(np.asarray, hfjax.init(layout, 0).params))
    params["head/lora/weight/b"] = b = RNG.standard_normal((2, 4), np.float32)
    state = hfjax.init(layout, 0, parameters=nest(params))
    merged = hfjax.to_model(layout, state)
    expected = params["head/weight"] + (params["head/lora/weight/a"] @ b).T
    np.testing.assert_allclose(merged["head"]["weight"], expected, rtol=1e-6)
    assert {*flatten(merged)} == {"layers/up", "layers/down", "head/weight", "bias"}
    by_path = model.lora.merge(layout, flatten(state.params))
    np.testing.assert_allclose(by_path["head/weight"], expected, rtol=1e-6)
    names = {adapter.map.name: (adapter.rank, adapter.scale) for adapter in model.lora.adapters}
    assert names == dict.fromkeys(["head/weight", "layers/down", "layers/up"], (2, 1.0))
    assert "note: adapters of 3 matrices" in str(layout)


class Parts(nnx.Module):
    """A model in three parts, of nnx's own modules."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers: Any = stack_layers(2, lambda rngs: nnx.Linear(8, 8, rngs=rngs), rngs)

    def embed(self, x: jax.Array) -> jax.Array:
        return x

    def head(self, x: jax.Array) -> jax.Array:
        return x

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, self.layers.kernel[...])[0]


def test_a_model_in_three_parts_is_run_as_it_is_written_or_refused():
    lora = hfjax.adapters.lora(Parts, rank=2, targets=["layers/kernel"])
    mesh = hfjax.make_mesh(fsdp=8)
    with pytest.raises(ValueError, match=r"three parts .* no linear maps of hfjax's"):
        hfjax.layout(lora, OPTIMIZER, mesh, hfjax.FSDP)
    layout = hfjax.layout(lora, OPTIMIZER, mesh, hfjax.FSDP, forward=WHOLE)
    assert layout.arrays["layers/lora/kernel/a"].shape == (2, 8, 2)
    assert layout.axes["layers/lora/kernel/b"] == ("layers", None, None)


class Perceptron(nnx.Module):
    """A norm, and two heads of a linear map."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.up = nnx.LinearGeneral(8, (2, 16), rngs=rngs)
        self.head = nnx.Linear(16, 3, rngs=rngs)


REFUSED: Any = {
    r"dropout=0.1: the model has no linear maps of hfjax's.* Leave dropout": {"dropout": 0.1},
    r"'bias' matches only head/bias, norm/bias, up/bias, and vectors": {"targets": "bias"},
    r"'norm' matches only norm/bias, norm/scale, and vectors have no adapters": {"targets": "norm"},
    r"'\*/kernal' matches no parameter(.|\n)*head/kernel\n(.|\n)*Did you": {"targets": "*/kernal"},
    r"rank=4 of head/kernel, which has 16 inputs and 3 outputs: at most 3": {"targets": "head"},
    r'targets="all-linear": the model has no linear maps of hfjax\'s': {},
    r"dims: 'x' matches no matrix": {"targets": "up", "dims": {"x": "io"}},
    r"dims='io' of up/kernel \(8, 2, 16\): a letter": {"targets": "up", "dims": {"up/k*": "io"}},
    r"dims='soo' of up/kernel": {"targets": "up", "dims": {"up/k*": "soo"}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_say_what_to_do(message):
    with pytest.raises(ValueError, match=message):
        hfjax.adapters.lora(Perceptron, rank=4, **REFUSED[message])


def test_letters_of_dimensions_are_not_for_linear_maps_of_hfjax():
    with pytest.raises(ValueError, match="the model's linear maps are hfjax's, which know"):
        hfjax.adapters.lora(lambda rngs: GPT(GPTConfig.tiny(), rngs=rngs), dims={"*": "io"})


def test_a_model_whose_constructor_cannot_be_traced_has_adapters():
    def eager(rngs: nnx.Rngs) -> dict:
        w = jax.random.normal(rngs.params(), (8, 8))
        return {"w": w / float(jnp.linalg.norm(w))}

    lora = hfjax.adapters.lora(eager, rank=2, targets="w")
    mesh, forward = hfjax.make_mesh(data=8), lambda params, x: x @ params["w"]
    layout = hfjax.layout(lora, OPTIMIZER, mesh, hfjax.DDP, forward=forward)
    state, metrics = hfjax.train_step(layout, squares)(hfjax.init(layout, 1), ROWS)
    np.testing.assert_allclose(np.linalg.norm(state.params["w"]), 1, rtol=1e-5)
    assert np.isfinite(metrics["loss"])
    assert np.any(np.asarray(state.params["lora"]["w"]["b"]))
