"""A layout on a mesh of one's own: taken as it is, and its shardings in a plain `jax.jit`."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

import hfjax
from hfjax.compat import PipeDream, partition
from hfjax.parallel.make_mesh import as_mesh
from hfjax.parallel.mesh import AXES
from tests.small_gpt import mlps

FSDP, DDP = hfjax.FSDP.edit(replicate_below=0), hfjax.DDP
ZERO1 = hfjax.ZERO1.edit(replicate_below=0)
SGD = optax.sgd(0.1, momentum=0.9)
NAMES = {"up": ("embed", "mlp"), "down": ("mlp", "embed"), "bias": ("embed",)}
BATCH = {"x": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)}
CASES = {
    "DDP": (DDP, {"data": 8}, {}),
    "ZERO1": (ZERO1, {"data": 8}, {}),
    "FSDP": (FSDP, {"fsdp": 4, "data": 2}, {}),
    "FSDP | TENSOR": (FSDP | hfjax.TENSOR, {"x": 2, "z": 1, "fsdp": 4}, {"x": "tensor", "z": None}),
}


def model(rngs):
    draw = lambda *shape: jax.random.normal(rngs.params(), shape) / 4
    return {"up": draw(8, 16), "down": draw(16, 8), "bias": jnp.zeros(8)}


def forward(params, batch):
    return jnp.tanh(batch["x"] @ params["up"]) @ params["down"] + params["bias"][None]


def loss(outputs, batch):
    return ((outputs - batch["x"]) ** 2).mean()


def own_mesh(sizes, axis_type=AxisType.Auto):
    types = (axis_type,) * len(sizes)
    return jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=types)


def make_layout(mesh, strategy=FSDP, **options):
    return hfjax.layout(model, SGD, mesh, strategy, forward=forward, axes=NAMES, **options)


def plain_step(layout, mesh):
    """Return a step in plain JAX of the layout's optimizer, on a mesh of one's own."""
    specs, shardings = layout.state_specs(mesh), layout.shardings(mesh)
    is_explicit = AxisType.Explicit in mesh.axis_types

    def place(tree, tree_specs):  # in the types of Explicit axes each array says where it is
        return jax.sharding.reshard(tree, tree_specs) if is_explicit else tree

    def compute_loss(params, batch):
        everywhere = jax.tree.map(lambda _: P(), params)
        return loss(forward(place(params, everywhere), batch), batch)

    def step(state, batch):
        value, gradient = jax.value_and_grad(compute_loss)(state.params, batch)
        gradient = place(gradient, specs.optimizer[0].trace)
        params = place(state.params, specs.optimizer[0].trace)
        updates, opt_state = layout.optimizer.update(gradient, state.optimizer, params)
        params = place(optax.apply_updates(params, updates), specs.params)
        return replace(state, step=state.step + 1, params=params, optimizer=opt_state), value

    batch_shardings = jax.tree.map(partial(NamedSharding, mesh), layout.batch_specs(BATCH, mesh))
    ins, outs = (shardings, batch_shardings), (shardings, None)
    return jax.jit(step, in_shardings=ins, out_shardings=outs), batch_shardings


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", CASES)
def test_a_plain_jit_on_ones_own_mesh_takes_the_steps_of_hfjax(name, axis_type, tmp_path):
    """And goes on from a checkpoint of hfjax, and hfjax from one of it."""
    strategy, sizes, mesh_axes = CASES[name]
    mesh = own_mesh(sizes, axis_type)
    layout = make_layout(mesh, strategy, mesh_axes=mesh_axes)
    step, losses = hfjax.train_step(layout, loss), []
    state = hfjax.init(layout)
    hfjax.save(tmp_path, layout, state)
    for _ in range(3):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))

    jitted, batch_shardings = plain_step(layout, mesh)
    own = hfjax.restore(tmp_path, layout).state
    own = jax.device_put(own, layout.shardings(mesh))
    batch = jax.device_put(BATCH, batch_shardings)
    for value in losses[:2]:
        with jax.set_mesh(mesh):
            own, found = jitted(own, batch)
        np.testing.assert_allclose(found, value, rtol=1e-6)

    hfjax.save(tmp_path, layout, own)
    back = hfjax.restore(tmp_path, layout).state
    moved = jax.device_put(own, layout.shardings())
    for again in (back, moved):
        again, metrics = step(again, BATCH)
        assert int(again.step) == 3
        np.testing.assert_allclose(metrics["loss"], losses[2], rtol=1e-6)
        pairs = zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True)
        assert all(np.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in pairs)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_axes_in_another_order_keep_each_device_at_its_coordinates(axis_type):
    mesh = own_mesh({"tensor": 2, "fsdp": 4, "pipe": 1}, axis_type)
    layout = make_layout(mesh, FSDP | hfjax.TENSOR)
    assert layout.mesh.axis_names == AXES
    assert {*layout.mesh.axis_types} == {AxisType.Auto}
    found = layout.mesh.devices
    assert found.shape == (1, 1, 4, 1, 1, 1, 2)
    assert (found.reshape(4, 2) == mesh.devices[..., 0].T).all()
    shapes = jax.tree.leaves(layout.state_shapes)
    shardings = [jax.tree.leaves(s) for s in (layout.shardings(), layout.shardings(mesh))]
    for x, theirs, own in zip(shapes, *shardings, strict=True):
        assert own.devices_indices_map(x.shape) == theirs.devices_indices_map(x.shape)


def test_the_mesh_of_hfjax_and_an_empty_one_are_taken():
    mesh = hfjax.make_mesh(data=4, tensor=2)
    assert as_mesh(mesh, {"batch": "data", "data": "tensor"}) is mesh  # the names of a model
    one = as_mesh(Mesh(np.array(jax.devices()[3]), ()))
    assert one.devices.item() is jax.devices()[3]
    explicit = own_mesh(dict(mesh.shape), AxisType.Explicit)
    assert as_mesh(explicit) == mesh


def test_a_pipe_of_haiscale_takes_it_too():
    layers = [lambda x: x, lambda x: x]
    with pytest.raises(ValueError, match="has 1 stages"):
        PipeDream(partition(layers, 2), 2, mesh=own_mesh({"data": 8}))


def test_specs_have_the_names_of_the_mesh_and_no_axis_of_size_1():
    layout = make_layout(own_mesh({"y": 4, "x": 2}), mesh_axes={"x": "data", "y": "fsdp"})
    ours = layout.state_specs()
    assert jax.tree.structure(ours) == jax.tree.structure(layout.state_shapes)
    assert ours.params == {path: layout.specs[path] for path in NAMES}
    assert jax.tree.map(lambda s: s.spec, layout.shardings()) == ours
    for mesh in (own_mesh({"x": 2, "y": 4}), AbstractMesh((2, 4, 3), ("x", "y", "more"))):
        specs = layout.state_specs(mesh)
        assert specs.params["up"] == specs.optimizer[0].trace["up"] == P("y")
        assert specs.step == P()
        assert layout.batch_specs(BATCH, mesh) == {"x": P(("x", "y"))}
    shapes = [jax.ShapeDtypeStruct((16, 3), "int32")]
    assert layout.batch_specs(shapes) == [P(("data", "fsdp"))]
    assert layout.shardings(layout.mesh).params["up"] == NamedSharding(layout.mesh, P("fsdp"))


def test_a_step_runs_while_any_mesh_is_set():
    mesh = jax.make_mesh((8,), ("data",))
    layout = make_layout(mesh, DDP)
    step, state = hfjax.train_step(layout, loss), hfjax.init(layout)
    message = (
        "a program of your own calls hfjax while a mesh with Explicit axes is set, data=8: JAX"
    )
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        jax.jit(step)(state, BATCH)
    with jax.set_mesh(mesh):
        state, first = step(state, BATCH)
    with jax.set_mesh(layout.mesh):
        assert step(state, BATCH)[1]["loss"] < float(first["loss"])


def test_a_replicated_state_fits_any_mesh():
    layout = make_layout(hfjax.make_mesh(data=8), DDP)
    assert layout.state_specs(own_mesh({"rows": 4, "columns": 2})).params["up"] == P()


def test_specs_serve_a_shard_map_and_a_mesh_that_is_set():
    mesh = own_mesh({"data": 2, "fsdp": 4}, AxisType.Auto)
    layout = make_layout(mesh)
    params, specs = hfjax.init(layout).params, layout.state_specs(mesh).params
    double = jax.shard_map(
        lambda tree: jax.tree.map(lambda x: 2 * x, tree),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=specs,
    )
    doubled = jax.jit(double)(jax.device_put(params, layout.shardings(mesh).params))
    np.testing.assert_array_equal(doubled["up"], 2 * params["up"])
    with jax.set_mesh(mesh):
        total = jax.jit(lambda batch: batch["x"].sum(), in_shardings=(layout.batch_specs(BATCH),))
        np.testing.assert_allclose(total(BATCH), BATCH["x"].sum(), rtol=1e-5)


MESH = {"data": 2, "fsdp": 4}
WRONG_MESHES = {
    r"hfjax does not know what x is for. Its own axes are pipe, .*mesh_axes=\{\"x\": \"data\"\}": (
        {"x": 2, "data": 4},
        None,
    ),
    r"x and y of the mesh are both data: each .*mesh_axes=\{\"y\": …\}": (
        {"x": 2, "y": 4},
        {"x": "data", "y": "data"},
    ),
    "x and data of the mesh are both data": ({"x": 8, "data": 1}, {"x": "data"}),
    "x is 'batch', which is no axis of hfjax. Map it to one of pipe, data, fsdp, .* or to None": (
        MESH,
        {"x": "batch"},
    ),
    "x is None, and has size 8 in the mesh: .* Map it to one of pipe": ({"x": 8}, {"x": None}),
    r"mesh_axes=\['x'\]: a dictionary of names is expected": (MESH, ["x"]),
    r"mesh_axes=\{0: 'data'\}: a dictionary of names is expected": (MESH, {0: "data"}),
}


@pytest.mark.parametrize("message", WRONG_MESHES)
def test_a_mesh_of_unknown_axes_is_refused(message):
    sizes, mesh_axes = WRONG_MESHES[message]
    with pytest.raises(ValueError, match=message):
        make_layout(own_mesh(sizes), mesh_axes=mesh_axes)


def test_no_mesh_is_refused():
    with pytest.raises(ValueError, match=r"this mesh has no devices.* hfjax.make_mesh\(data=-1\)"):
        make_layout(jax.sharding.get_mesh())
    with pytest.raises(
        ValueError, match=r"hfjax.make_mesh or jax.make_mesh is expected, found Abs"
    ):
        make_layout(AbstractMesh((8,), ("data",)))


def test_names_that_the_mesh_lacks_may_be_mapped():
    layout = make_layout(own_mesh(MESH), mesh_axes={"batch": "data", "model": "tensor", "z": None})
    assert layout.template.mesh_axes == {"batch": "data", "model": "tensor", "z": None}
    assert layout.state_specs(own_mesh(MESH)).params["up"] == P("fsdp")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 8}, r"splits over fsdp of size 4; the mesh has no fsdp \(.*=8\). Give .* fsdp=4"),
        ({"data": 1, "fsdp": 8}, r"on fsdp=4, splits over fsdp of size 4; the mesh has fsdp=8 \("),
        (
            {"shards": 8},
            r"fsdp \(shards by mesh_axes\) of size 4; .* Give a mesh with shards=4, na",
        ),
    ],
)
def test_a_mesh_without_an_axis_of_the_layout_is_refused(sizes, message):
    mesh = hfjax.make_mesh(fsdp=4, devices=jax.devices()[:4])
    layout = make_layout(mesh, mesh_axes={"shards": "fsdp"})
    for specs in (layout.state_specs, layout.shardings, partial(layout.batch_specs, BATCH)):
        with pytest.raises(ValueError, match=message):
            specs(own_mesh(sizes))


def test_what_is_no_mesh_and_no_batch_is_refused():
    layout = make_layout(hfjax.make_mesh(data=2, fsdp=4))
    with pytest.raises(ValueError, match=r"mesh is dict: a mesh of jax.make_mesh is expected, or"):
        layout.state_specs(MESH)  # type: ignore
    with pytest.raises(ValueError, match=r"batch\['n'\] is an array without dim.*first dimension"):
        layout.batch_specs({"n": np.float32(1)})
    with pytest.raises(ValueError, match=r"batch\[0\] is int: a batch is a pytree of arrays"):
        layout.batch_specs([3])


class Unlike(nnx.Module):
    """Layers of two kinds: stages pack them."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 4, rngs=rngs), nnx.Linear(4, 8, rngs=rngs)])

    def embed(self, x):
        return x

    head = embed


def test_states_that_specs_do_not_describe_are_refused():
    mesh, own = hfjax.make_mesh(pipe=2, data=4), own_mesh({"pipe": 2, "data": 4})
    layout = hfjax.layout(mlps(layers=4), SGD, mesh, hfjax.PIPE)
    assert layout.state_specs(own).params["layers"]["mlp"]["up"]["kernel"] == P("pipe")
    in_chunks = hfjax.train_step(
        layout,
        lambda outputs, batch: outputs.mean(),
        schedule=hfjax.Schedule("interleaved", 4),
    ).layout
    packed = hfjax.layout(Unlike, SGD, mesh, hfjax.PIPE)
    host = make_layout(hfjax.make_mesh(fsdp=8), FSDP | hfjax.HOST_OPTIMIZER)
    cases = [
        (in_chunks, r"in the order \[0, 2, 1, 3\], not in the model's. .* layout.model_layout"),
        (packed, r"the layers of a list packed into rows. .*hfjax.to_model_order\(layout, state\)"),
        (host, r": optimizer state in host memory, .* Leave HOST_OPTIMIZER and HOST_PARAMETERS"),
    ]
    for refused, message in cases:
        for specs in (refused.state_specs, refused.shardings):
            with pytest.raises(ValueError, match=message):
                specs(own)
    assert in_chunks.model_layout.state_specs(own).params["layers"]["mlp"]["up"]["kernel"] == P(
        "pipe"
    )
