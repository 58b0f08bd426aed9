"""Devices that are not here: asked for by name, refused with what to install."""

import pytest

import hfjax
from hfjax import target
from tests.h200 import h200s


def test_an_unknown_gpu_names_the_known_ones():
    with pytest.raises(ValueError, match=r"gpu 'b300': one of h100, h200"):
        hfjax.target_devices("b300")


def test_without_the_wheels_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(target, "can_compile_for_gpus", lambda: False)
    with pytest.raises(ValueError, match=r"pip install --no-deps jax-cuda1[23]-plugin=="):
        hfjax.target_devices("h200", 8)


@pytest.mark.cuda
def test_whole_hosts_of_eight():
    assert len(h200s(512)) == 512
    with pytest.raises(ValueError, match="count=12: up to 8, or a multiple of 8"):
        hfjax.target_devices("h200", 12)
