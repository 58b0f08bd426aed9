"""All axes always exist; one may be inferred; a mesh that cannot be is refused with numbers."""

import jax
import pytest
from jax.sharding import AxisType

from hfjax.parallel.make_mesh import make_mesh
from hfjax.parallel.mesh import AXES
from hfjax.trainer.config import MeshConfig, TrainConfig
from hfjax.trainer.strategy import build_mesh


def test_all_axes_exist_in_order_and_size_one_is_off():
    mesh = make_mesh(tensor=2, data=4)
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == dict.fromkeys(AXES, 1) | {"data": 4, "tensor": 2}
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_minus_one_takes_the_devices_that_are_left():
    assert make_mesh(data=-1, tensor=4).shape["data"] == 2
    assert make_mesh(devices=jax.devices()[:2], fsdp=-1).shape["fsdp"] == 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 4, "tensor": 4}, r"data=4 x tensor=4 needs 16 devices, found 8. Lower one axis"),
        ({"data": -1, "tensor": 3}, "8 devices do not split into groups of 3"),
        ({"data": -1, "fsdp": -1}, "only one axis can be -1"),
        ({"model": 2}, "unknown mesh axis 'model'. Axes: pipe, data"),
        ({"data": 0}, "data=0: a size is a positive integer"),
        ({"tensor": (2, 2)}, r"tensor=\(2, 2\): a size is a positive integer"),
        (
            {"data": 2, "devices": [*jax.devices()[:1]] * 2},
            r"devices=.*: the same device is there 2 times.*Give each once",
        ),
        ({"devices": ["cpu:0"]}, r"devices=\['cpu:0'\]\): devices are expected, as jax.devices"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"data": 2, "tensor": 2}, "mesh data=2 x tensor=2 takes 4 of 8 devices: 4 stay idle"),
        ({"data": 3}, r"mesh data=3 takes 3 of 8 devices: 5 stay idle. .*\(data=-1\)"),
        ({}, r"takes 1 of 8 devices: 7 stay idle. .*devices=jax.devices\(\)\[:1\]"),
        ({"devices": jax.devices()[:3], "fsdp": 2}, "fsdp=2 takes 2 of 3 devices: 1 stay idle"),
    ],
)
def test_devices_that_are_left_over_are_told_of(sizes, told):
    with pytest.warns(UserWarning, match=told):
        make_mesh(**sizes)


def test_a_mesh_of_all_devices_that_it_is_given_says_nothing(recwarn):
    make_mesh(data=8)
    make_mesh(devices=jax.devices()[:2], fsdp=2)
    # A run says by itself how many devices it uses.
    build_mesh(TrainConfig(mesh=MeshConfig(data=2), devices=2))
    assert not recwarn.list
