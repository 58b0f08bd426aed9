"""All axes always exist; one may be inferred; a mesh that cannot be is refused with numbers."""

import jax
import pytest
from jax.sharding import AxisType

from hfjax.parallel.mesh import AXES, make_mesh


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
    ],
)
def test_a_mesh_that_cannot_be_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes)
