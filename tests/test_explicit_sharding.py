"""Models with explicit sharding run as they are, equal to one device.

The oracle is the same model on a mesh of one device whose axes are Explicit.
"""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

import hfjax
from hfjax.parallel.adapters.model_template import make_rngs

DIM, HIDDEN, VOCAB, LAYERS = 16, 32, 24, 2
SGD = optax.sgd(0.05, momentum=0.9)
BATCH = {"tokens": np.random.default_rng(0).integers(0, VOCAB, (8, 8)).astype("int32")}
AXES = {
    "tokens": ("vocab", "embed"),
    "up": ("layers", "embed", "mlp"),
    "down": ("layers", "mlp", "embed"),
    "scale": ("layers", "embed"),
}
STRATEGIES = {
    "one device": (hfjax.DDP, {"data": 1}),
    "DDP": (hfjax.DDP, {"data": 8}),
    "ZeRO-2": (hfjax.ZERO2, {"data": 4}),
    "FSDP": (hfjax.FSDP, {"fsdp": 8}),
    "HSDP": (hfjax.HSDP, {"data": 2, "fsdp": 2}),
    "TENSOR": (hfjax.TENSOR, {"tensor": 2}),
    "FSDP | TENSOR": (hfjax.FSDP | hfjax.TENSOR, {"fsdp": 2, "tensor": 2}),
}
OWN_NAMES = {"x": "data", "y": "tensor"}


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def init(rngs, x="x", y="y"):
    """Return the parameters of a small language model; initializers place them."""
    draw = partial(jax.random.normal, dtype=jnp.float64)
    return {
        "tokens": draw(rngs.params(), (VOCAB, DIM), out_sharding=P(y, x)),
        "up": draw(rngs.params(), (LAYERS, DIM, HIDDEN), out_sharding=P(None, x, y)) / 4,
        "down": draw(rngs.params(), (LAYERS, HIDDEN, DIM), out_sharding=P(None, y, x)) / 6,
        "scale": jnp.ones((LAYERS, DIM), jnp.float64, out_sharding=P(None, None)),
    }


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def cube(x, y, h):
    """Return h**3, with a derivative of its own that is half of it, and places what it returns."""
    return jax.sharding.reshard(h**3, P(x, None, y))


cube.defvjp(
    lambda x, y, h: (cube(x, y, h), h),
    lambda x, y, h, g: (jax.sharding.reshard(1.5 * g * h**2, P(x, None, y)),),
)


def forward(params, batch, x="x", y="y"):
    """Return logits; every operation that may say how its result is sharded does."""
    reshard, activations = jax.sharding.reshard, P(x, None, None)
    h = params["tokens"].at[batch["tokens"]].get(out_sharding=activations)

    @jax.checkpoint
    def layer(h, weights):
        up, down, scale = weights
        normed = h * jax.lax.rsqrt((h**2).mean(-1, keepdims=True) + 1e-6) * scale[None, None]
        wide = jnp.einsum("bsd,df->bsf", normed, up, out_sharding=P(x, None, y))
        wide = jax.nn.silu(wide) + jnp.asarray(cube(x, y, jnp.tanh(wide)))
        out = jax.lax.dot_general(wide, down, (((2,), (0,)), ((), ())), out_sharding=activations)
        is_large = jnp.abs(scale).sum() > 1
        out = jax.lax.cond(
            is_large, lambda z: reshard(2 * z, P(x)), lambda z: reshard(z, P(x)), out
        )
        assert (
            jax.sharding.get_abstract_mesh().shape[x] == jax.typeof(h).sharding.mesh.shape[x] == 1
        )
        return h + out, None

    stack = params["up"], params["down"], params["scale"]
    h = jax.lax.scan(layer, reshard(h, activations), stack)[0]
    positions = jax.lax.broadcasted_iota(jnp.float64, h.shape, 1, out_sharding=activations)
    h = (h + positions / 100).at[:, 0].multiply(2.0, out_sharding=activations)
    logits = jnp.einsum("bsd,vd->bsv", h, params["tokens"], out_sharding=P(x, None, y))
    center = lambda z: z - z.mean(-1, keepdims=True)
    return jax.sharding.auto_axes(center, out_sharding=P(x, None, y))(logits)


def loss(logits, batch, x="x"):
    logits = jax.sharding.reshard(logits, P(x))
    targets = jnp.take_along_axis(logits, batch["tokens"][..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - targets).mean()


def on_one_device(init, forward, loss, batch=BATCH, names=("x", "y"), steps=2):
    """Return [loss, norm of the gradient, ...] of plain JAX on a mesh of one device, and params."""
    types = (AxisType.Explicit,) * len(names)
    mesh = jax.make_mesh((1,) * len(names), names, types, devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        params, numbers = init(make_rngs(0)), []
        state = SGD.init(params)

        @jax.jit
        def step(params, state):
            compute = lambda params: loss(forward(params, batch), batch)
            value, gradients = jax.value_and_grad(compute)(params)
            updates, state = SGD.update(gradients, state, params)
            norm = optax.global_norm(gradients)
            return optax.apply_updates(params, updates), state, (value, norm)

        for _ in range(steps):
            params, state, metrics = step(params, state)
            numbers += map(float, metrics)
        return numbers, jax.tree.map(np.asarray, params)


def build(strategy, sizes, init=init, forward=forward, loss=loss, execution=None, **options):
    """Return a layout and its step."""
    sizes_of_all = hfjax.make_mesh(**sizes, devices=jax.devices()[: np.prod([*sizes.values()])])
    edited = strategy.edit(replicate_below=0)
    layout = hfjax.layout(init, SGD, sizes_of_all, edited, forward=forward, **options)
    return layout, hfjax.train_step(layout, loss, **execution or {})


def train(layout, step, batch=BATCH, steps=2):
    state, numbers = hfjax.init(layout), []
    for _ in range(steps):
        state, metrics = step(state, batch)
        numbers += [float(metrics["loss"]), float(metrics["grad_norm"])]
    return numbers, jax.tree.map(np.asarray, state.params)


def assert_equal(trained, expected):
    np.testing.assert_allclose(trained[0], expected[0], rtol=1e-10)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12), *(trained[1], expected[1])
    )


@pytest.fixture(scope="module")
def expected():
    with jax.enable_x64(True):
        return on_one_device(init, forward, loss)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.short("one device", "ZeRO-2", "FSDP", "FSDP | TENSOR")
def test_a_model_with_explicit_sharding_equals_one_device(name, expected):
    layout, step = build(*STRATEGIES[name], axes=AXES, mesh_axes=OWN_NAMES)
    assert_equal(train(layout, step), expected)


# -- a module in three parts --------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs):
        draw = partial(jax.random.normal, dtype=jnp.float64)
        self.norm = nnx.LayerNorm(DIM, rngs=rngs, param_dtype=jnp.float64, dtype=jnp.float64)
        up = draw(rngs.params(), (DIM, HIDDEN), out_sharding=P("x", "y")) / 4
        self.up = nnx.Param(up, axes=("embed", "mlp"))
        self.down = nnx.Param(draw(rngs.params(), (HIDDEN, DIM)) / 6, axes=("mlp", "embed"))

    def __call__(self, h):
        wide = jnp.dot(self.norm(h), self.up[...], out_sharding=P("x", None, "y"))
        out = jnp.dot(jax.nn.relu(wide), self.down[...], out_sharding=P("x", None, None))
        return h + jax.sharding.reshard(out, P("x"))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        tokens = jax.random.normal(rngs.params(), (VOCAB, DIM), jnp.float64)
        self.tokens = nnx.Param(tokens, axes=("vocab", "embed"))
        self.layers = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def embed(self, batch):
        return self.tokens[...].at[batch["tokens"]].get(out_sharding=P("x", None, None))

    def head(self, h):
        return jnp.einsum("bsd,vd->bsv", h, self.tokens[...], out_sharding=P("x", None, "y"))

    def __call__(self, batch):
        h = self.embed(batch)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


IN_THREE_PARTS = {
    "FSDP, accumulated": (
        hfjax.FSDP,
        {"fsdp": 2},
        {"remat": "full", "gradient_accumulation_steps": 2},
    ),
    "TENSOR": (hfjax.TENSOR | hfjax.SEQUENCE, {"tensor": 2}, {}),
    "PIPE": (hfjax.PIPE, {"pipe": 2}, {"schedule": hfjax.Schedule("zb-h1", 2)}),
    "GRID": (hfjax.GRID, {"row": 2, "tensor": 2}, {}),
    "CONTEXT": (hfjax.CONTEXT, {"context": 2}, {}),
    "PIPE | FSDP": (
        hfjax.PIPE | hfjax.FSDP,
        {"pipe": 2, "fsdp": 2},
        {"schedule": hfjax.Schedule("1f1b", 4)},
    ),
    "host": (hfjax.HOST_PARAMETERS | hfjax.FSDP, {"fsdp": 4}, {}),
    "own examples": (hfjax.DDP, {"data": 4}, {"batch_view": "local"}),
    "in backward": (hfjax.FSDP, {"fsdp": 4}, {"optimizer_in_backward": True}),
    "offload": (hfjax.FSDP, {"fsdp": 4}, {"offload": 1.0}),
}


@pytest.fixture(scope="module")
def decoder():
    with jax.enable_x64(True):
        graph, _, rest = nnx.split(abstract_decoder(), nnx.Param, ...)

        def init(rngs):
            with nnx.use_eager_sharding(False):
                return nnx.state(Decoder(rngs), nnx.Param)

        run = lambda params, batch: nnx.merge(graph, params, rest)(batch)
        numbers, params = on_one_device(init, run, loss)
        return numbers, nnx.to_pure_dict(params)


def abstract_decoder():
    mesh = jax.sharding.AbstractMesh((1, 1), ("x", "y"), (AxisType.Explicit,) * 2)
    with jax.sharding.use_abstract_mesh(mesh), nnx.use_eager_sharding(False):
        return nnx.eval_shape(lambda: Decoder(make_rngs(0)))


@pytest.mark.parametrize("name", IN_THREE_PARTS)
@pytest.mark.short("FSDP, accumulated", "PIPE", "GRID")
def test_layers_with_explicit_sharding_run_under_every_strategy(name, decoder):
    strategy, sizes, execution = IN_THREE_PARTS[name]
    options = {"mesh_axes": OWN_NAMES, "forward": None, "execution": execution}
    layout, step = build(strategy, sizes, Decoder, **options)
    numbers, _ = train(layout, step)
    np.testing.assert_allclose(numbers, decoder[0], rtol=1e-9)


# -- what becomes of the specs ------------------------------------------------------------------


def mlp(rngs):
    draw = lambda *shape: jax.random.normal(rngs.params(), shape, jnp.float64) / 4
    return {"up": draw(8, 32), "down": draw(32, 8)}


MLP_AXES = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
ROWS = np.random.default_rng(1).normal(size=(8, 8))


def squared(outputs, batch):
    return (outputs**2).mean()


def plain_mlp(params, x):
    return jax.nn.relu(x @ params["up"]) @ params["down"]


def placed_mlp(params, x):
    h = jnp.dot(x, params["up"], out_sharding=P("data", "tensor"))
    h = jax.nn.relu(h)
    return jnp.dot(h, params["down"], out_sharding=P("data", None))


def constrained_mlp(params, x):
    h = jax.lax.with_sharding_constraint(x @ params["up"], P("data", "tensor"))
    return jax.lax.with_sharding_constraint(jax.nn.relu(h) @ params["down"], P("data", None))


def build_mlp(forward, strategy=hfjax.FSDP | hfjax.TENSOR, sizes=None, **options):
    sizes, options = sizes or {"fsdp": 2, "tensor": 2}, {"axes": MLP_AXES, **options}
    return build(strategy, sizes, mlp, forward, squared, **options)


def constraints_over_tensor(layout, forward):
    """Return the specs of the constraints in the program of a prediction."""
    predict = hfjax.predict_step(layout, forward)
    text = str(jax.make_jaxpr(predict)(layout.abstract_state(), ROWS))
    return re.findall(r"sharding_constraint\[.*?spec=P\((.*?)\)", text, re.DOTALL)


def test_a_spec_over_the_tensor_axis_is_a_constraint_and_others_are_not():
    layout, step = build_mlp(plain_mlp)
    before = constraints_over_tensor(layout, plain_mlp)
    for forward in (placed_mlp, constrained_mlp):
        after = constraints_over_tensor(layout, forward)
        assert sorted(after) == sorted([*before, "None, 'tensor'"])
    layout, step = build_mlp(placed_mlp)
    assert str(step.shardings) == "the model asks for no sharding"
    step.trace(ROWS)
    lines = str(step.shardings).splitlines()
    assert [re.split(r"  +", line)[1:] for line in lines] == [
        ["P('data', 'tensor')", "constraint P(None, 'tensor')"],
        ["P('data', None)", "the strategy decides"],
    ]
    assert all("test_explicit_sharding.py:" in line for line in lines)


@pytest.mark.parametrize("forward", [placed_mlp, constrained_mlp])
def test_a_model_that_places_its_arrays_sends_what_one_sends_that_does_not(forward):
    programs = [build_mlp(f)[1].lower(ROWS) for f in (plain_mlp, forward)]
    plain, placed = map(hfjax.collectives, programs)
    assert str(plain) == str(placed)
    numbers = [train(*build_mlp(f), ROWS) for f in (plain_mlp, forward)]
    assert_equal(*numbers)


IN_PROGRAMS = {
    "a branch": lambda h: jax.lax.switch(
        jnp.int32(jnp.abs(h).sum()) % 2,
        [lambda z: jax.sharding.reshard(z, P("data", "tensor")), lambda z: 2 * z],
        h,
    ),
    "a dimension that is open": jax.sharding.auto_axes(
        lambda z: jax.lax.with_sharding_constraint(2 * z, P("data", P.UNCONSTRAINED)),
        out_sharding=P("data", "tensor"),
    ),
    "a vmapped gradient": jax.vmap(
        jax.grad(lambda z: (jax.sharding.reshard(z, P("tensor")) ** 3).sum())
    ),
    "a reshape": lambda h: jax.lax.reshape(
        jax.lax.reshape(h, (8, 4, 8), out_sharding=P("data", "tensor", None)),
        (8, 32),
        out_sharding=P("data", "tensor"),
    ),
    "a slice that is written": lambda h: jax.lax.dynamic_update_slice(
        jax.sharding.reshard(h, P("data")), h[:, :2], (0, 3)
    ),
    "classes": lambda h: h * jax.nn.one_hot(jnp.int32(h.argmax(-1)), 32, dtype=h.dtype),
    "groups of examples": lambda h: jax.sharding.auto_axes(
        lambda h: jax.lax.ragged_dot(h, jnp.ones((2, 32, 32)) / 32, jnp.array([3, 5])),
        out_sharding=P("data", "tensor"),
    )(h),
    "a scatter beside a gather of examples": lambda h: (
        h.at[:, 3].set(1.0, out_sharding=P("data", "tensor")).at[2].set(-1.0)
    ),
    "a scatter without specs": lambda h: h.at[:, 3].set(1.0).at[2].set(-1.0),
}


def test_a_spec_in_a_branch_is_no_constraint_and_the_report_says_so():
    forward = lambda params, x: IN_PROGRAMS["a branch"](x @ params["up"]) @ params["down"]
    _, step = build_mlp(forward)
    step.trace(ROWS)
    (line,) = str(step.shardings).splitlines()
    assert line.endswith("P('data', 'tensor')  the strategy decides")


SCATTERS = {
    "set": lambda h: h.at[:, 3].set(1.0),
    "multiply": lambda h: h.at[:, 3].multiply(2.0),
    "an entry": lambda h: h.at[5, 7].set(0.5),
}


@pytest.mark.parametrize("name", SCATTERS)
@pytest.mark.short("set")
def test_a_scatter_along_a_split_dimension_changes_no_number(name):
    """XLA's partitioner of jax 0.10 computes it wrongly."""
    forward = lambda params, x: SCATTERS[name](jnp.tanh(x @ params["up"])) @ params["down"]
    names = {"up": (None, "mlp"), "down": (None, "mlp")}
    expected = train(*build_mlp(forward, hfjax.DDP, {"data": 1}), ROWS)
    for strategy, sizes in (STRATEGIES["TENSOR"], (hfjax.TENSOR, {"tensor": 4})):
        assert_equal(train(*build_mlp(forward, strategy, sizes, axes=names), ROWS), expected)


# What JAX's training cookbook and jax-llm-examples (Llama 3, Qwen 3) are written with.
OF_PUBLIC_MODELS = """out_sharding= jnp.einsum( .get(out_sharding jax.lax.reshape( auto_axes(
reshard( jax.typeof( jax.shard_map( jax.vmap( jax.checkpoint jax.nn.one_hot( jax.lax.ragged_dot(
jax.lax.dynamic_update_slice( jax.random.normal get_abstract_mesh( jax.lax.axis_index( jax.lax.psum(
jax.lax.psum_scatter(""".split()


def test_these_models_are_written_with_what_public_ones_are():
    text = Path(__file__).read_text()
    assert [name for name in OF_PUBLIC_MODELS if text.count(name) < 2] == []


@pytest.mark.parametrize("name", IN_PROGRAMS)
def test_specs_in_programs_change_no_number(name):
    forward = lambda params, x: IN_PROGRAMS[name](x @ params["up"]) @ params["down"]
    expected = train(*build_mlp(forward, hfjax.DDP, {"data": 1}), ROWS)
    assert_equal(train(*build_mlp(forward), ROWS), expected)


def test_names_of_axes_that_nothing_maps_split_nothing():
    with_names = lambda a, b: (
        lambda params, x: jnp.dot(
            jnp.dot(x, params["up"], out_sharding=P(("rows", a), b)), params["down"]
        )
    )
    layout, step = build_mlp(with_names("data", "columns"))
    expected = train(*build_mlp(lambda params, x: x @ params["up"] @ params["down"]), ROWS)
    assert_equal(train(layout, step, ROWS), expected)
    assert "the strategy decides" in str(step.shardings)
    layout, step = build_mlp(with_names("data", "columns"), mesh_axes={"columns": "tensor"})
    assert_equal(train(layout, step, ROWS), expected)
    assert "constraint P(None, 'tensor')" in str(step.shardings)


def test_a_model_sees_the_axes_that_it_is_told_of():
    def forward(params, x):
        mesh = jax.sharding.get_abstract_mesh()
        assert mesh.shape["z"] == mesh.shape["y"] == 1, mesh
        return plain_mlp(params, x)

    build_mlp(forward, mesh_axes={"y": "tensor", "z": None})[1].trace(ROWS)


def test_a_function_on_each_devices_own_examples_may_place_its_arrays():
    centre = hfjax.per_device(
        lambda h: jax.sharding.reshard(h - h.mean(0, keepdims=True), P("data"))
    )
    plain = hfjax.per_device(lambda h: h - h.mean(0, keepdims=True))
    runs = [
        train(*build_mlp(lambda p, x, f=f: f(x @ p["up"]) @ p["down"]), ROWS)
        for f in (centre, plain)
    ]
    assert_equal(*runs)


def test_a_mesh_of_the_models_own_counts_by_the_names_of_its_axes():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    place = lambda h: jax.lax.with_sharding_constraint(
        h, jax.NamedSharding(mesh, P("data", "tensor"))
    )
    forward = lambda params, x: place(x @ params["up"]) @ params["down"]
    layout, step = build_mlp(forward)
    expected = train(*build_mlp(lambda params, x: x @ params["up"] @ params["down"]), ROWS)
    assert_equal(train(layout, step, ROWS), expected)
    assert "constraint P(None, 'tensor')" in str(step.shardings)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_all_of_it_runs_while_a_mesh_is_set(kind, tmp_path):
    expected = train(*build_mlp(placed_mlp), ROWS)
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(kind,) * 2)):
        layout, step = build_mlp(placed_mlp)
        assert_equal(train(layout, step, ROWS), expected)
        state, _ = step(hfjax.init(layout), ROWS)
        gradients, _ = step.gradients(state, ROWS)
        state, _ = step.apply(state, gradients + gradients)
        hfjax.save(tmp_path, layout, state)
        state = hfjax.restore(tmp_path, layout).state
        hfjax.eval_step(layout, squared)(state, ROWS)
        assert hfjax.predict_step(layout)(state, ROWS[:7]).shape == (7, 8)
        hfjax.to_model(layout, state)
        cases = {"FSDP": (hfjax.FSDP, {"fsdp": 2})}
        hfjax.testing.assert_strategies_agree(
            mlp, squared, ROWS, cases, steps=1, forward=placed_mlp
        )


def test_a_shard_map_over_the_models_own_mesh_runs_as_over_axes_of_size_one():
    def local(h):
        h = jax.lax.scan(lambda h, _: (jax.lax.pmean(h, "x"), None), h, length=2)[0]
        total = jax.lax.psum(jax.nn.relu(h), ("x", "y")) + jax.lax.axis_index("x")
        return jax.lax.psum_scatter(total, "y", scatter_dimension=1, tiled=True)

    def forward(params, x):
        h = jax.sharding.reshard(x @ params["up"], P("x", "y"))
        run = jax.shard_map(local, in_specs=P("x", "y"), out_specs=P("x", "y"), check_vma=False)
        h = jax.lax.cond(h.sum() > -1e9, run, lambda h: h, h)
        return h @ params["down"]

    expected = train(*build_mlp(plain_mlp), ROWS)
    assert_equal(train(*build_mlp(forward, mesh_axes=OWN_NAMES), ROWS), expected)
    one = build_mlp(forward, hfjax.DDP, {"data": 1}, mesh_axes=OWN_NAMES)
    assert_equal(train(*one, ROWS), expected)


# -- what cannot be -----------------------------------------------------------------------------

reshard = jax.sharding.reshard
REFUSED = {
    r"test_explicit_sharding.py:\d+.*: P\('data', None, 'fsdp'\) has 3 entries, and the array is "
    r"float64\[8, 32\]|Length of sharding.spec \(3\) must be equal": lambda h: reshard(
        h, P("data", None, "fsdp")
    ),
    r"test_explicit_sharding.py:\d+.*: P\(None, 'tensor'\) splits dimension 1 of an array of "
    r"float64\[8, 3\] over tensor of size 2, which does not divide it": lambda h: reshard(
        h[:, :3], P(None, "tensor")
    ),
    r"the model places its arrays .* in a way that cannot run inside a step.*JAX says": (
        lambda h: jax.shard_map(
            jnp.sin, mesh=jax.make_mesh((8,), ("x",)), in_specs=P("x"), out_specs=P("x")
        )(h)
    ),
    "the model computes an array's value while it is traced .* with NumPy": (
        lambda h: reshard(h, P("data")) * value_of_an_array()
    ),
}


def value_of_an_array():
    with jax.ensure_compile_time_eval():
        return float(jnp.sqrt(jnp.float64(4.0)))


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_model_cannot_ask_for_is_refused(message):
    place = REFUSED[message]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        build_mlp(lambda params, x: place(x @ params["up"]).sum(1))[1].trace(ROWS)


def test_two_names_of_a_model_for_one_axis_are_refused():
    message = "mesh_axes: x and y are both tensor. Map one of them to None"
    with pytest.raises(ValueError, match=message):
        build_mlp(plain_mlp, mesh_axes={"x": "tensor", "y": "tensor"})


def test_an_array_made_under_a_mesh_that_is_set_is_refused_inside_a_model():
    with jax.set_mesh(jax.make_mesh((8,), ("x",))):
        table = jnp.ones((8, 32))
        step = build_mlp(lambda params, x: reshard(x @ params["up"] + table, P("x")).sum(1))[1]
        with pytest.raises(ValueError, match="the model closes over an array that was made while"):
            step.trace(ROWS)
