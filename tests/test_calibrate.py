"""Constants of the devices at hand: measured, written, guarded.

No test looks at a time: sizes are tiny, and others use the cores too.
"""

from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from hfjax.hardware.machine import CONSTANTS, Machine
from hfjax.planner.calibration.calibrate import calibrate, calibrate_cpu, calibrate_gpu
from hfjax.planner.calibration.stopwatch import Stopwatch

BRIEF = {"block": 0.001, "rounds": 1}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, Machine, list[str]]:
    """Return a file, its machine, and what was told."""
    path, told = tmp_path_factory.mktemp("here") / "here.toml", []
    return path, calibrate(path, told.append, quick=True), told


def test_file_is_written_and_loads(written):
    path, machine, told = written
    assert Machine.load(path) == machine
    assert (machine.key, machine.platform, machine.sms, machine.tile) == ("cpu", "cpu", 1, (1, 1))
    assert machine.per_node == jax.device_count()
    assert told[-1] == f"written: {path}"
    assert "transfers" in told


def test_every_constant_says_where_it_is_from(written):
    _, machine, _ = written
    for name in ("flops", "flops_fp32", "stream", "launch", "start_up", "inside"):
        assert machine.source(name).startswith("measured: hfjax plan --calibrate here, 20")
    for name in ("tile", "sms", "between", "host_link", "attention_forward_64"):
        assert machine.source(name).startswith("assumed: ")


def test_guards(written):
    _, machine, _ = written
    kind = jax.devices()[0].device_kind
    machine.check_calibrated_for(kind, jax.__version__)
    with pytest.raises(ValueError, match="Calibrate it again here"):
        machine.check_calibrated_for(kind, "0.0.1")
    with pytest.raises(ValueError, match="this is NVIDIA H100"):
        machine.check_calibrated_for("NVIDIA H100", jax.__version__)


def test_one_device_sends_nothing():
    machine = calibrate_cpu(Stopwatch(jax.devices()[:1], True, **BRIEF), quick=True)
    assert machine.source("inside").startswith("assumed: ")
    assert machine.inside == machine.stream


def test_path_of_gpus_runs_here():
    """By the clock, with the attention that this device has."""
    machine = calibrate_gpu(Stopwatch(jax.devices()[:2], False, **BRIEF), quick=True)
    assert machine.platform == "gpu"
    for name in ("flops", "inside", "inside_hop", "attention_backward_128", "launch"):
        assert machine.source(name).startswith("measured: ")
        assert getattr(machine, name) > 0
    for name in ("between", "tile", "peak", "per_node"):
        assert machine.source(name).startswith("assumed: ")
    assert set(machine.sources) == set(CONSTANTS)


def test_refuses_other_devices(tmp_path):
    with pytest.raises(ValueError, match=r"'tpu'. Allowed: gpu, cpu"):
        calibrate(tmp_path / "x", devices=[SimpleNamespace(platform="tpu")])
