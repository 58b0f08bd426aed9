"""Offloaded gradients are tried once before the first step, and wrong ones are refused."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import hfjax
from hfjax.models.gpt import next_token_loss
from hfjax.parallel.compiler_options import host_options
from hfjax.parallel.offload import check_host_loops
from hfjax.parallel.offload.activations import ToHost
from hfjax.parallel.offload.host_residuals import save_residuals_on_host
from hfjax.step import build
from tests.h200 import OPTIMIZED, h200s
from tests.small_gpt import gpt_layout


@pytest.fixture
def asked(monkeypatch):
    """A mesh of CPU devices that are taken for GPUs, of which nothing is known yet."""
    check_host_loops._check.cache_clear()
    monkeypatch.setattr(check_host_loops, "platform_of", lambda mesh: "gpu")
    yield hfjax.make_mesh(devices=jax.devices()[:2], data=2)
    check_host_loops._check.cache_clear()


def test_right_gradients_pass_and_are_tried_once(asked, monkeypatch):
    tried = []
    real = check_host_loops._gradient
    monkeypatch.setattr(check_host_loops, "_gradient", lambda *a: tried.append(a) or real(*a))
    for _ in range(2):
        check_host_loops.check_host_loops(asked)
    assert [on_host for *_, on_host in tried] == [True, False]


def test_a_loop_that_reads_the_host_in_the_wrong_order_is_refused(asked, monkeypatch):
    real = check_host_loops._gradient

    def wrong(device, options, on_host):
        weights, x = real(device, options, on_host)
        return [weights[::-1] if on_host else weights, x]

    monkeypatch.setattr(check_host_loops, "_gradient", wrong)
    with pytest.raises(ValueError, match=r"gradients of a loop .* are wrong here .* newer jax"):
        check_host_loops.check_host_loops(asked)


def test_a_check_within_a_trace_runs_at_once(asked):
    def traced(x):
        check_host_loops.check_host_loops(asked)
        return x + 1

    assert jax.jit(traced)(1.0) == 2


@pytest.mark.parametrize("options", [{"offload": 0.5}, {"offload": "dots"}])
def test_a_step_that_uses_the_host_asks_first(options, monkeypatch):
    asked = []
    monkeypatch.setattr(build, "check_host_loops", lambda mesh, given: asked.append(given))
    layout = gpt_layout(hfjax.DDP, {"data": 1})
    hfjax.train_step(layout, next_token_loss)
    assert asked == []
    hfjax.train_step(layout, next_token_loss, **options)
    assert len(asked) == 1


# -- compiled for GPUs that are not here -----------------------------------------------------------


def strides(options):
    """Of each slice that a loop reads from the host and XLA thinks it can follow: its stride."""
    mesh = hfjax.make_mesh(devices=h200s(1), data=1)
    layer = lambda known, w, x: (jnp.tanh(x @ w), ())
    run = save_residuals_on_host(
        layer, lambda tensors: {i: ToHost() for i in range(len(tensors))}, barrier=False
    )

    def loss(weights, x):
        y, _ = jax.lax.scan(lambda x, w: (run((), w, x)[0], None), x, weights)
        return (y**2).sum()

    where = NamedSharding(mesh, P())
    shape = lambda *of: jax.ShapeDtypeStruct(of, "float32", sharding=where)
    gradient = jax.jit(jax.grad(loss), compiler_options=OPTIMIZED | options)
    text = gradient.lower(shape(5, 256, 256), shape(128, 256)).compile().as_text()
    assert text is not None
    reads = re.findall(r" = f32\[1,128,256\]\{2,1,0\} dynamic-slice\(.*", text)
    assert reads
    followed = (re.findall(r'byte_stride":"(-?\d+)"', line) for line in reads)
    return [int(stride[-1]) for stride in followed if stride]


@pytest.mark.cuda
def test_compiled_for_an_h200_a_loop_that_counts_down_reads_the_host_downwards():
    assert all(stride < 0 for stride in strides(host_options("gpu")))
