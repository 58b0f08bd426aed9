"""Devices that are not here: asked for by name, refused with what to install."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

import hfjax
from hfjax.analysis import targets
from tests.h200 import h200s
from tests.workers import environment


def test_an_unknown_gpu_names_the_known_ones():
    with pytest.raises(ValueError, match=r"gpu 'b300': one of h100, h200"):
        hfjax.analysis.target_devices("b300")


def test_without_the_wheels_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(targets, "can_compile_for_gpus", lambda: False)
    with pytest.raises(
        ValueError, match=r"install --no-deps --target .*/cuda jax-cuda1[23]-plugin=="
    ):
        hfjax.analysis.target_devices("h200", 8)


def test_what_compiles_for_cuda_is_installed_aside_and_only_seen_when_it_is_asked_for(
    tmp_path, monkeypatch
):
    assert "--target $(VENV)/cuda" in (Path(__file__).parents[1] / "Makefile").read_text()
    monkeypatch.setattr(targets, "_installed", lambda: False)
    monkeypatch.setattr(targets, "ASIDE", tmp_path)
    assert not targets.can_compile_for_gpus()
    (tmp_path / "jax_cuda13_plugin").mkdir()
    assert targets.can_compile_for_gpus()
    assert str(tmp_path) not in sys.path
    assert f"pip install --no-deps --target {tmp_path} jax-cuda" in targets.how_to_install()


LATE = """
import sys, jax, jax.numpy as jnp
print(jax.devices()[0].platform, any("cuda" in path for path in sys.path))
import hfjax
here = jax.sharding.SingleDeviceSharding(hfjax.analysis.target_devices("h200", 8)[0])
draw = lambda data: jnp.linalg.cholesky(jax.random.normal(jax.random.wrap_key_data(data), (4, 4)))
drawn = jax.jit(draw, in_shardings=here, out_shardings=here)
drawn.lower(jax.ShapeDtypeStruct((2,), "uint32")).compile()  # calls functions of the plugin
print(jax.devices()[0].platform, jnp.ones(3).sum())
"""


@pytest.mark.cuda
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU is here")
def test_a_program_that_has_started_compiles_for_gpus_and_goes_on_without_one():
    h200s()
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "JAX_PLATFORMS": ""}
    done = subprocess.run(
        [sys.executable, "-c", LATE], env=environment() | quiet, capture_output=True, text=True
    )
    assert done.stdout.split() == ["cpu", "False", "cpu", "3.0"], done.stderr
    assert "jax_plugins" not in done.stderr


@pytest.mark.cuda
def test_whole_hosts_of_eight():
    assert len(h200s(512)) == 512
    with pytest.raises(ValueError, match="count=12: up to 8, or a multiple of 8"):
        hfjax.analysis.target_devices("h200", 12)
