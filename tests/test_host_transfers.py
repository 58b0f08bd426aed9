"""Copies between device and host: what a trace tells of them, loops multiplied out."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import hfjax
from hfjax import DDP, FSDP, HOST_OPTIMIZER, PIPE, TENSOR
from hfjax.analysis.count_transfers import HostTransfer, Transfers, host_transfers
from hfjax.analysis.memory_copies import TO_DEVICE, TO_HOST
from hfjax.models.gpt import next_token_loss
from hfjax.parallel.offload.host_memory import host_sharding, is_host_sharding
from tests.small_gpt import gpt_layout, tokens

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
X = jax.ShapeDtypeStruct((8, 4), jnp.float32)  # 128 bytes


def to_host(x):
    return jax.device_put(x, HOST)


def to_device(x):
    return jax.device_put(x, DEVICE)


def mesh():
    return jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


def copies(f, *arrays):
    return host_transfers(jax.jit(f).trace(*arrays))


def sums(found):
    return {d: (found.count(d), found.total(d)) for d in (TO_HOST, TO_DEVICE)}


def test_a_copy_to_the_host_is_one_row():
    (row,) = copies(to_host, X)
    assert row == HostTransfer("to host", "float32", (8, 4), 128, 1, "")


def test_there_and_back_is_a_row_for_each_direction():
    assert sums(copies(lambda x: to_device(to_host(x * 2)) + 1, X)) == {
        TO_HOST: (1, 128),
        TO_DEVICE: (1, 128),
    }


def test_what_is_already_there_is_not_copied():
    assert len(copies(lambda x: to_device(to_device(x) * 2), X)) == 0
    assert sums(copies(lambda x: to_host(to_host(x)), X))[TO_HOST] == (1, 128)


def stashed(x):
    """A scan that sends its carry to the host, and one that fetches it again, last row first."""
    forward = lambda c, _: (jnp.sin(c), to_host(c))
    backward = lambda c, y: (c + jnp.cos(to_device(y)), None)
    last, ys = lax.scan(forward, x, None, length=5)
    return lax.scan(backward, last, ys, reverse=True)[0]


def test_a_scan_multiplies_by_its_length():
    found = copies(stashed, X)
    assert sums(found) == {TO_HOST: (5, 640), TO_DEVICE: (5, 640)}
    assert {row.where for row in found} == {"loop of 5"}


def test_nested_scans_multiply():
    run = lambda x: lax.scan(lambda c, _: (stashed(c), None), x, None, length=3)[0]
    found = copies(run, X)
    assert sums(found) == {TO_HOST: (15, 1920), TO_DEVICE: (15, 1920)}
    assert {row.where for row in found} == {"loop of 3 > loop of 5"}


def test_an_unrolled_scan_copies_as_much():
    run = lambda x: lax.scan(lambda c, _: (c + to_device(to_host(c)), 0), x, None, 6, unroll=3)[0]
    assert sums(copies(run, X)) == {TO_HOST: (6, 768), TO_DEVICE: (6, 768)}


def test_a_stack_on_the_host_is_fetched_row_by_row():
    """An argument on the host, read and written in a loop."""
    stack = jax.ShapeDtypeStruct((6, 8, 4), jnp.bfloat16, sharding=host_sharding(mesh(), P()))

    def run(stack):
        def body(i, stack):
            row = to_host(to_device(lax.dynamic_index_in_dim(stack, i, 0, False)) * 2)
            return lax.dynamic_update_slice(stack, row[None], (i, 0, 0))

        return lax.fori_loop(0, 6, body, stack)

    found = copies(run, stack)
    assert sums(found) == {TO_HOST: (6, 384), TO_DEVICE: (6, 384)}
    assert {row.shape for row in found} == {(8, 4)}


def test_a_loop_of_unknown_length_counts_once_and_says_so():
    go = lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: to_device(to_host(c)) + 1, x)
    found = copies(go, X)
    assert sums(found) == {TO_HOST: (1, 128), TO_DEVICE: (1, 128)}
    assert {row.where for row in found} == {"loop of unknown length"}


def test_of_two_branches_the_heavier_counts():
    def run(x):
        y = to_host(x)
        fetch = lambda y: to_device(y) * 2 + to_device(to_host(x + 1))
        return lax.cond(x.sum() > 0, fetch, lambda y: to_device(y), y)

    found = copies(run, X)
    assert sums(found) == {TO_HOST: (2, 256), TO_DEVICE: (2, 256)}
    assert {row.where for row in found} == {"", "heaviest of 2 branches"}


def test_within_a_shard_map_shapes_are_of_one_device():
    run = jax.shard_map(stashed, mesh=mesh(), in_specs=P("data"), out_specs=P("data"))
    found = copies(run, X)
    assert sums(found) == {TO_HOST: (5, 160), TO_DEVICE: (5, 160)}
    assert {(row.shape, row.is_global) for row in found} == {((2, 4), False)}


def test_along_axes_that_a_shard_map_leaves_shapes_are_divided():
    grid = jax.make_mesh((2, 2), ("pipe", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    spec = P("pipe", None, "fsdp")
    stack = jax.ShapeDtypeStruct((6, 8, 4), jnp.float32, sharding=host_sharding(grid, spec))

    def device(stack):
        def body(i, stack):
            row = to_device(lax.dynamic_slice_in_dim(stack, i, 1)) * 2
            row = to_host(lax.with_sharding_constraint(row, P(None, None, "fsdp")))
            return lax.dynamic_update_slice(stack, row, (i, 0, 0))

        return lax.fori_loop(0, 3, body, stack)

    home = P("pipe")
    places = {"in_specs": home, "out_specs": home, "axis_names": {"pipe"}, "check_vma": False}
    found = copies(jax.shard_map(device, mesh=grid, **places), stack)
    rows = {(row.direction, row.shape, row.count, row.is_global) for row in found}
    assert rows == {(TO_HOST, (1, 8, 2), 3, False), (TO_DEVICE, (1, 8, 2), 3, False)}


def test_outside_a_shape_is_divided_as_a_constraint_says():
    split = NamedSharding(mesh(), P(None, "data"))
    found = copies(lambda x: to_host(lax.with_sharding_constraint(x, split)), X)
    assert [(row.shape, row.bytes, row.is_global) for row in found] == [((8, 1), 32, False)]


def test_outside_an_argument_is_divided_as_its_sharding_says():
    stack = jax.ShapeDtypeStruct(
        (6, 8, 4), jnp.float32, sharding=host_sharding(mesh(), P(None, "data"))
    )
    run = lambda x: lax.map(lambda row: to_host(to_device(row) * 2), x)
    found = copies(run, stack)
    assert {(row.shape, row.count, row.is_global) for row in found} == {((2, 4), 6, False)}


def test_a_constraint_may_leave_a_dimension_as_it_was():
    grid = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(grid, P(None, "tensor")))
    rows = NamedSharding(grid, P("data", P.UNCONSTRAINED))
    found = copies(lambda x: to_host(lax.with_sharding_constraint(x, rows)), x)
    assert [(row.shape, row.is_global) for row in found] == [((4, 2), False)]


def test_a_row_is_marked_where_nothing_says_how_it_is_split():
    split = NamedSharding(mesh(), P("data"))
    run = lambda x: (to_host(x * 2), lax.with_sharding_constraint(x, split))
    found = copies(run, X)
    assert [(row.shape, row.is_global) for row in found] == [((8, 4), True)]
    assert "* whole, along some axis at least: the program does not say" in str(found)


def test_shardings_of_a_jit_within_and_of_the_results_are_known():
    there = host_sharding(mesh(), P("data"))
    split = NamedSharding(mesh(), P("data"))
    within = jax.jit(lambda x: x * 2, in_shardings=split, out_shardings=split)
    found = copies(lambda x: to_host(within(x)), X)
    assert [(row.shape, row.is_global) for row in found] == [((2, 4), False)]
    traced = jax.jit(lambda x: (x, within(x)), out_shardings=(split, there)).trace(X)
    rows = [(row.direction, row.shape, row.is_global) for row in host_transfers(traced)]
    assert rows == [(TO_HOST, (2, 4), False)]


STEPS = {
    "one device": (DDP, {"data": 1}, {}),
    "FSDP": (FSDP, {"data": 2, "fsdp": 2}, {"max_grad_norm": 1.0}),
    "beside a tensor axis": (FSDP | TENSOR, {"fsdp": 2, "tensor": 2}, {}),
    "a pipeline": (
        PIPE | TENSOR,
        {"pipe": 2, "tensor": 2},
        {"schedule": hfjax.Schedule("1f1b", 4)},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", STEPS)
def test_a_step_fetches_and_returns_a_devices_own_part_of_the_moments(case):
    strategy, sizes, execution = STEPS[case]
    layout = gpt_layout(strategy | HOST_OPTIMIZER, sizes, optax.adamw(1e-3))
    step = hfjax.train_step(layout, next_token_loss, **execution)
    found = host_transfers(step.trace(tokens()))
    local = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    moments = jax.tree.leaves(step.layout.abstract_state().optimizer)
    there = sum(local(x) for x in moments if is_host_sharding(x.sharding))
    assert found.to_host == found.to_device == there > 0
    assert not any(row.is_global for row in found)


def test_a_program_for_one_device_is_in_one_piece():
    assert [row.is_global for row in copies(to_host, X)] == [False]


def test_the_program_lowered_for_a_gpu_holds_these_copies():
    lowered = jax.jit(stashed).trace(X).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count('_xla_buffer_placement = "pinned_host"') == 1  # in a loop, as above
    assert lowered.count('_xla_buffer_placement = "device"') == 1


def test_gradients_through_a_checkpoint_count_forward_and_backward():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["kept"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    layer = jax.checkpoint(lambda x: jnp.sin(checkpoint_name(jnp.sin(x), "kept")), policy=policy)
    loss = lambda x: lax.scan(lambda c, _: (layer(c), None), x, None, length=7)[0].sum()
    assert sums(copies(jax.grad(loss), X)) == {TO_HOST: (7, 896), TO_DEVICE: (7, 896)}


def test_what_nothing_reads_is_not_counted():
    assert len(copies(lambda x: (to_host(x), x + 1)[1], X)) == 0


def test_the_table_shows_rows_and_sums():
    rows = (
        HostTransfer("to host", "bfloat16", (8, 1024), 16384, 24, "loop of 24"),
        HostTransfer("to device", "float32", (4,), 16, 1, ""),
    )
    assert str(Transfers(rows, "jaxpr")).splitlines() == [
        "copies between device and host of one call, per device (jaxpr)",
        "direction  array                bytes  count      total  where",
        "to host    bfloat16[8,1024]  16.0 KiB     24  384.0 KiB  loop of 24",
        "to device  float32[4]            16 B      1       16 B",
        "to host 24 x, 384.0 KiB; to device 1 x, 16 B",
    ]
    assert str(Transfers((), "jaxpr")).endswith("(jaxpr): none")


def test_a_direction_that_is_none_is_refused():
    with pytest.raises(ValueError, match="direction is 'up'; allowed are to host, to device"):
        Transfers((), "jaxpr").total("up")


@pytest.mark.parametrize("program", [to_host, jax.jit(to_host).lower(X)], ids=["f", "lowered"])
def test_only_traced_programs_are_read(program):
    with pytest.raises(ValueError, match=r"program is a (function|Lowered); allowed are .*Traced"):
        host_transfers(program)
