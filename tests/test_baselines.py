"""The baselines train as one device does, and send what their formula says over each link."""

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import hfjax
from baselines.halving_doubling import halving_doubling_all_reduce
from baselines.links import links
from baselines.parameter_server import check_servers, parameter_server_step
from baselines.ring import ring_all_reduce
from hfjax.testing import assert_same_run
from tests.baselines import (
    DEVICE,
    NUMBERS,
    OPTIMIZER,
    PARAMETERS,
    ROWS,
    Baseline,
    data_parallel,
    halving_doubling,
    loss,
    on_one_device,
    parameter_server,
    ring,
    two_level,
)
from tests.workers import ROOT, environment

BASELINES = {
    **{f"DataParallel on {n}": data_parallel(n) for n in (2, 3, 4, 8)},
    **{
        f"{servers} servers of {n}": parameter_server(n, servers)
        for n, servers in ((2, 1), (3, 1), (3, 2), (4, 1), (8, 2), (8, 5))
    },
    **{f"ring of {n}": ring(n) for n in (2, 3, 4, 8)},
    **{f"halving and doubling on {n}": halving_doubling(n) for n in (2, 3, 4, 6, 8)},
    **{f"{m} nodes of {g}": two_level(m, g) for m, g in ((1, 2), (3, 1), (2, 2), (2, 4), (4, 2))},
    "2 nodes of 3, halved across": two_level(2, 3, halving_doubling_all_reduce),
}
DAILY = (
    "DataParallel on 3",
    "2 servers of 8",
    "ring of 3",
    "halving and doubling on 6",
    "2 nodes of 4",
)
MORE = pytest.param(
    tuple(name for name in BASELINES if name not in DAILY), id="more", marks=pytest.mark.slow
)


@pytest.mark.slow
@pytest.mark.parametrize("names", [pytest.param(DAILY, id="daily"), MORE])
def test_baselines_train_as_one_device_does_in_float64(names):
    with jax.enable_x64(True):
        wanted = on_one_device(steps=3)
        for name in names:
            run = BASELINES[name].run(steps=3)
            assert assert_same_run(run, wanted._replace(metrics={}), name) < 1e-12


# --- what each sends: P bytes of parameters, on n devices -----------------------------------------

P_ = 4 * NUMBERS
X = Y = 4 * 6 * ROWS  # of what the model reads of a batch, and of its outputs
MANY = (2, 3, 4, 6, 8, 16, 24)


def each_sends(found, n):
    return [found.sent(device) for device in range(n)]


@pytest.mark.parametrize("n", MANY)
@pytest.mark.short("2", "24")
def test_the_master_of_data_parallel_sends_the_parameters_to_each_other_device(n):
    found, others = data_parallel(n).links(), n - 1
    master = others * P_ + others * (X + Y) // n
    assert each_sends(found, n) == [master, *[P_ + Y // n] * others]
    assert found.received(0) == others * P_ + others * Y // n
    assert found.busiest() == master
    assert found.steps == 5 * others


@pytest.mark.parametrize(
    ("n", "servers"), [(2, 1), (3, 1), (4, 1), (4, 2), (8, 2), (8, 4), (16, 4)]
)
@pytest.mark.short("2-1", "16-4")
def test_a_server_sends_its_shard_to_each_worker_and_hears_from_each(n, servers):
    found, workers = parameter_server(n, servers).links(), n - servers
    of_server = workers * P_ // servers
    assert each_sends(found, n) == [of_server] * servers + [P_] * workers
    assert [found.received(d) for d in range(n)] == each_sends(found, n)
    assert found.busiest() == max(of_server, P_)
    assert found.steps == 2 * max(servers, workers)


@pytest.mark.parametrize("n", MANY)
@pytest.mark.short("2", "24")
def test_in_a_ring_every_link_carries_less_than_twice_the_gradient(n):
    found = ring(n).links()
    assert each_sends(found, n) == [2 * (n - 1) * P_ // n] * n
    assert found.busiest() == 2 * (n - 1) * P_ // n
    assert found.busiest(node=n // 2 or 1) == 2 * (n - 1) * P_ // n  # each node has one neighbour
    assert found.steps == 2 * (n - 1)
    assert set(found.between) == {(i, (i + 1) % n) for i in range(n)}


@pytest.mark.parametrize("n", MANY)
@pytest.mark.short("2", "24")
def test_halving_and_doubling_sends_as_little_in_logarithmic_steps(n):
    found, core = halving_doubling(n).links(), 2 ** int(np.log2(n))
    pair = [P_, P_ + 2 * (core - 1) * P_ // core]
    rest = n - 2 * (n - core)
    assert each_sends(found, n) == pair * (n - core) + [2 * (core - 1) * P_ // core] * rest
    assert found.busiest() == max(each_sends(found, n))
    assert found.steps == 2 * int(np.log2(core)) + 2 * (core < n)


@pytest.mark.parametrize(("nodes", "devices"), [(2, 2), (2, 4), (4, 2), (3, 4), (2, 8), (4, 8)])
@pytest.mark.short("3-4")
def test_of_two_levels_only_the_sum_of_a_node_leaves_it(nodes, devices):
    found, n = two_level(nodes, devices).links(), nodes * devices
    inside = 2 * (devices - 1) * P_ // devices
    across = 2 * (nodes - 1) * P_ // nodes
    assert each_sends(found, n) == [inside + across // devices] * n
    assert found.busiest(node=devices) == across
    assert found.steps == 2 * (devices - 1) + 2 * (nodes - 1)


def test_halving_first_across_nodes_fills_the_link_of_a_node():
    """Each of a node's devices sends half of its vector out of it, and then a quarter."""
    found = halving_doubling(16).links()
    assert found.busiest(node=4) == 4 * 2 * (P_ // 2 + P_ // 4)


@pytest.mark.parametrize("all_reduce", [ring_all_reduce, halving_doubling_all_reduce])
def test_any_array_is_added_its_last_piece_filled_up(all_reduce):
    mesh, spec = hfjax.make_mesh(data=8), P("data")
    add = lambda x: all_reduce(x, "data")
    add = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jnp.arange(8 * 3 * 7.0).reshape(24, 7)
    wanted = np.tile(np.asarray(x).reshape(8, 3, 7).sum(0), (8, 1))
    np.testing.assert_allclose(add(x), wanted)
    found = links(add.lower(x))
    assert found.busiest() == 2 * 7 * 4 * 3  # ceil(21 / 8) numbers a piece


@pytest.mark.slow
def test_the_example_prints_the_tables_of_the_page():
    run = [sys.executable, "examples/why_all_reduce.py"]
    told = subprocess.run(run, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    table = told.stdout.split("\n\nA master")[0]
    page = (ROOT / "docs/appendix_tensor_grids.md").read_text(encoding="utf-8")
    assert f"```\n{table}\n```" in page


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "servers", "fits"), [(1, 1, "take at least 2"), (4, 4, "1 to 3 do"), (4, 0, "1 to 3 do")]
)
def test_servers_without_a_worker_and_workers_without_a_server_are_refused(n, servers, fits):
    with pytest.raises(ValueError, match=f"{servers} servers on {n} devices.*{fits}"):
        check_servers(servers, n)
    step = parameter_server_step(loss, OPTIMIZER, PARAMETERS, DEVICE, servers)
    with pytest.raises(ValueError, match=f"{servers} servers on {n} devices"):
        Baseline(step, {DEVICE: n}, range(n), range(n)).lowered()


def test_rows_that_do_not_divide_among_the_devices_are_refused():
    with pytest.raises(ValueError, match="96 rows do not divide among 5 devices; pass a multiple"):
        data_parallel(5).lowered()


def lowered(body, n=4):
    mesh = hfjax.make_mesh(data=n, devices=jax.devices()[:n])
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    return jax.jit(mapped).lower(jnp.zeros((8, 2), np.float32))


def test_links_multiply_loops_out():
    def body(x):
        step = lambda i, x: lax.ppermute(x, "data", [(0, 1), (1, 2)])
        return lax.fori_loop(0, 5, step, x)

    found = links(lowered(body))
    assert (found.between, found.steps) == ({(0, 1): 80, (1, 2): 80}, 5)
    assert (found.sent(2), found.received(2), found.busiest(node=2)) == (0, 80, 80)


def test_links_of_a_program_with_other_collectives_are_refused():
    with pytest.raises(ValueError, match=r"has all-reduce beside permutes.*hfjax\.collectives"):
        links(lowered(lambda x: x + lax.psum(x, "data")))


def test_links_of_anything_but_a_lowered_program_are_refused():
    compiled: Any = lowered(lambda x: x).compile()
    with pytest.raises(ValueError, match=r"program is a Compiled; a jax\.stages\.Lowered"):
        links(compiled)
