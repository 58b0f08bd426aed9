"""A mesh axis is a line of MESH_AXES in parallel/mesh.py: what its meaning implies, follows."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import optax
import pytest
from jax.sharding import PartitionSpec as P

import hfjax
from hfjax.checks import check_step
from hfjax.parallel.mesh import AXES, BATCH_AXES, MESH_AXES, TENSOR_AXES, Axis, keeps_sharded
from hfjax.sharding import check_layout
from tests import extra_axes

BEFORE, AFTER = '    "data": Axis(batch=True),\n', '    "tensor": Axis(auto=True),\n'
MANUAL = """    "pretend_rows": Axis(batch=True),
    "specialist": Axis(batch=True, keeps_sharded="specialists"),
    "positions": Axis(sequence=True),
"""
PARTITIONED = '    "matrix": Axis(auto=True),\n'
STAYS = ("rows and stays", "rows and stays, read as a whole")
DAILY = ("rows, FSDP", *STAYS, "sequence, FSDP", "partitioner")


def trained(folder: Path, *cases: str) -> dict[str, float]:
    """Return how far each case is from one device, in a copy of the package with four more axes."""
    shutil.copytree(
        Path(hfjax.__file__).parent, folder / "hfjax", ignore=shutil.ignore_patterns("__pycache__")
    )
    table = folder / "hfjax" / "parallel" / "mesh.py"
    text = table.read_text(encoding="utf-8")
    for known, rows in ((BEFORE, MANUAL + BEFORE), (AFTER, AFTER + PARTITIONED)):
        assert text.count(known) == 1
        text = text.replace(known, rows)
    table.write_text(text, encoding="utf-8")
    command = [sys.executable, "-W", "ignore", extra_axes.__file__, *cases]
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[1])])  # hfjax, then tests
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_new_axis_of_each_meaning_needs_one_line_in_MESH_AXES(tmp_path):  # noqa: N802
    assert "pretend_rows" not in AXES  # else it is none that only a copy knows
    found = trained(tmp_path, *DAILY)
    assert list(found) == list(DAILY)
    assert max(found.values()) < 2e-5, found


@pytest.mark.slow
def test_new_axes_train_as_one_device_under_every_strategy_and_schedule(tmp_path):
    found = trained(tmp_path)
    assert len(found) == 12
    assert max(found.values()) < 2e-5, found


def test_groups_of_axes_follow_from_the_table():
    assert AXES == tuple(MESH_AXES)
    assert AXES[-len(TENSOR_AXES) :] == TENSOR_AXES  # after all others
    assert BATCH_AXES == ("data", "fsdp", "expert")
    assert keeps_sharded("pipe", "layers")
    assert keeps_sharded("expert", "experts")
    assert not keeps_sharded("pipe", None)
    assert not keeps_sharded("fsdp", "layers")


def test_an_idle_axis_of_a_meaning_like_experts_is_not_told_to_add_experts(monkeypatch):
    like = {**MESH_AXES, "data": Axis(batch=True, keeps_sharded="specialists")}
    monkeypatch.setattr(check_step, "MESH_AXES", like)
    monkeypatch.setattr(check_layout, "MESH_AXES", like)
    mesh = hfjax.make_mesh(data=2, devices=jax.devices()[:2])
    layout = hfjax.layout(extra_axes.gpt, optax.sgd(0.1), mesh, hfjax.DDP)
    message = r"over data under DDP\. .*'specialists' and a .* parameters=\{'specialists': 'data'\}"
    with pytest.raises(ValueError, match=message):
        hfjax.train_step(layout, lambda y, batch: y.mean())


@pytest.mark.parametrize("given", [{}, {"norm/scale": P("expert")}], ids=["idle", "in a spec"])
@pytest.mark.parametrize("strategy", [hfjax.DDP, hfjax.FSDP | hfjax.EXPERT], ids=["DDP", "EXPERT"])
def test_an_axis_of_experts_without_experts_is_refused(given, strategy):
    mesh = hfjax.make_mesh(expert=2, data=4)
    layout = hfjax.layout(extra_axes.gpt, optax.sgd(0.1), mesh, strategy).with_specs(given)
    with pytest.raises(ValueError, match=r"data=4 x expert=2: no parameter stays split over exper"):
        hfjax.train_step(layout, lambda y, batch: y.mean())
