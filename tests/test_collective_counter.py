"""What a program sends: by hand, from what was written and from what was compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from hfjax.analysis import hlo
from hfjax.analysis.count_collectives import Collective, Collectives, collectives
from tests.h200 import h200s

NAMES = ("data", "fsdp", "tensor")


def cube():
    return jax.make_mesh((2, 2, 2), NAMES, axis_types=(AxisType.Auto,) * 3)


def lowered(body, *arrays, mesh=None):
    """`body` under shard_map, all in and out replicated, lowered for arrays like these."""
    mesh = mesh or cube()
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, P()))
    return jax.jit(mapped).lower(*map(place, arrays))


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def only(program):
    (row,) = collectives(program)
    return row


def gather(x, axes):
    return lax.all_gather(x, axes, tiled=True)


X = array(8, 16)  # 512 bytes
ONE_AXIS = {
    "all-reduce": (lambda x, a: lax.psum(x, a), (8, 16), 512),
    "all-gather": (lambda x, a: gather(x, a)[:8], (16, 16), 1024),
    "reduce-scatter": (
        lambda x, a: jnp.tile(lax.psum_scatter(x, a, tiled=True), (2, 1)),
        (8, 16),
        512,
    ),
    "permute": (lambda x, a: lax.ppermute(x, a, [(0, 1), (1, 0)]), (8, 16), 512),
    "all-to-all": (lambda x, a: lax.all_to_all(x, a, 0, 0, tiled=True), (8, 16), 512),
}


@pytest.mark.parametrize("axis", NAMES)
@pytest.mark.parametrize("kind", ONE_AXIS)
def test_a_collective_over_one_axis_of_the_cube_is_one_row_with_its_larger_side(kind, axis):
    run, shape, nbytes = ONE_AXIS[kind]
    row = only(lowered(lambda x: run(x, axis), X))
    assert row == Collective(kind, (axis,), "float32", shape, nbytes, 1, "", 2)


@pytest.mark.parametrize("kind", ONE_AXIS)
def test_the_compiled_program_shows_the_same_collective(kind):
    run, shape, nbytes = ONE_AXIS[kind]
    row = only(lowered(lambda x: run(x, "fsdp"), X).compile())
    assert (row.kind, row.axes, row.bytes, row.count) == (kind, ("fsdp",), nbytes, 1)
    assert np.prod(row.shape) == np.prod(shape)  # an all-to-all comes apart into (peers, …)


@pytest.mark.parametrize("axes", [("data", "fsdp"), ("fsdp", "data"), ("data", "tensor"), NAMES])
def test_groups_over_several_axes_are_named_in_mesh_order(axes):
    def body(x):
        return lax.psum(x, axes) + gather(x, axes)[:8]

    program, n = lowered(body, X), 2 ** len(axes)
    for counted in (collectives(program), collectives(program.compile())):
        assert {row.axes for row in counted} == {tuple(a for a in NAMES if a in axes)}
        assert {row.devices for row in counted} == {n}
        assert counted.total("all-gather", axes) == 512 * n


def test_a_ring_over_two_axes_is_a_permute_along_both():
    def body(x):
        return lax.ppermute(x, ("data", "fsdp"), [(i, (i + 1) % 4) for i in range(4)])

    row = only(lowered(body, X))
    assert (row.kind, row.axes, row.devices, row.moved) == ("permute", ("data", "fsdp"), 4, 512)


def test_axes_of_size_one_are_neither_named_nor_counted():
    mesh = jax.make_mesh((4, 1, 2), NAMES, axis_types=(AxisType.Auto,) * 3)
    program = lowered(lambda x: lax.psum(lax.psum(x, "fsdp"), ("fsdp", "tensor")), X, mesh=mesh)
    assert only(program).axes == ("tensor",)
    assert only(program.compile()).axes == ("tensor",)


def test_groups_within_an_axis_are_of_that_axis_and_others_are_a_question_mark():
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    for axes, halves, named in (
        ("fsdp", [[0, 1], [2, 3]], ("fsdp",)),
        (("data", "fsdp"), [[0, 1, 2, 4], [3, 5, 6, 7]], ("?",)),
    ):
        add = lambda x, over=axes, groups=halves: lax.psum(x, over, axis_index_groups=groups)
        program, size = lowered(add, X, mesh=mesh), len(halves[0])
        for row in (only(program), only(program.compile())):
            assert (row.axes, row.devices) == (named, size)
            assert row.moved == 512 * 2 * (size - 1) // size


@pytest.mark.parametrize(
    ("kind", "moved"),
    [
        ("all-gather", 3 * 512),  # (n - 1) / n of 2048
        ("reduce-scatter", 3 * 128),
        ("all-reduce", 2 * 3 * 128),
        ("all-to-all", 3 * 128),
        ("permute", 512),
    ],
)
def test_moved_is_what_one_device_sends_by_a_ring(kind, moved):
    axes = ("data", "fsdp")
    bodies = {
        "all-gather": lambda x: gather(x, axes)[:8],
        "reduce-scatter": lambda x: lax.psum_scatter(x, axes, tiled=True),
        "all-reduce": lambda x: lax.psum(x, axes),
        "all-to-all": lambda x: lax.all_to_all(x, axes, 0, 0, tiled=True),
        "permute": lambda x: lax.ppermute(x, axes, [(0, 3), (3, 0)]),
    }
    program = lowered(bodies[kind], X)
    assert collectives(program).moved == moved
    assert collectives(program.compile()).moved == moved


def test_moved_is_rounded_up_to_bytes():
    row = Collective("all-reduce", ("?",), "float32", (), 4, 1, "", 3)
    assert row.moved == 6  # 2 * 2 / 3 * 4 = 5.33


def test_every_dtype_is_named_as_jax_names_it():
    names = ["bfloat16", "int8", "uint8", "float8_e4m3fn", "complex64", "float16", "uint32"]
    tree = [array(8, 2, dtype=name) for name in names]
    found = collectives(lowered(lambda *xs: tuple(gather(x, "data") for x in xs), *tree))
    assert {row.dtype for row in found} == set(names)
    assert all(row.bytes == 32 * jnp.dtype(row.dtype).itemsize for row in found)
    flags = only(lowered(lambda x: gather(x, "data"), array(8, 2, dtype=bool)))
    assert (flags.dtype, flags.bytes) == ("bool", 32)


# --- loops, calls and branches --------------------------------------------------------------------


def twice_nested(x):
    def inner(c, _):
        return lax.psum(c, "data") * 0.1, None

    def outer(c, _):
        c, _ = lax.scan(inner, c, None, length=3)
        return lax.psum(c, "fsdp"), None

    return lax.scan(outer, x, None, length=5)[0]


def test_nested_scans_multiply():
    program = lowered(twice_nested, X)
    for counted in (collectives(program), collectives(program.compile())):
        assert (counted.count(axes="data"), counted.count(axes="fsdp")) == (15, 5)
    where = {row.axes: row.where for row in collectives(program)}
    assert where == {("data",): "loop of 5 > loop of 3", ("fsdp",): "loop of 5"}


def test_a_function_called_twice_counts_twice():
    inner = jax.jit(lambda x: lax.psum(x, "data") * 0.1)
    row = only(lowered(lambda x: inner(inner(x)), X))
    assert (row.count, row.where) == (2, "")


def test_a_loop_whose_bound_is_an_argument_of_a_called_function_is_counted_out():
    inner = jax.jit(lambda n, x: lax.fori_loop(0, n, lambda _, y: lax.psum(y, "data") * 0.1, x))
    counted = collectives(lowered(lambda x: inner(jnp.int32(6), x) + inner(jnp.int32(2), x), X))
    assert {(row.where, row.count) for row in counted} == {("loop of 6", 6), ("loop of 2", 2)}


@pytest.mark.parametrize(
    ("start", "go", "step", "trips"),
    [
        (0, lambda i: i < 7, 1, 7),
        (2, lambda i: i < 9, 3, 3),
        (0, lambda i: i <= 7, 1, 8),
        (11, lambda i: i > 0, -2, 6),
        (3, lambda i: i >= 0, -1, 4),
        (5, lambda i: i < 5, 1, 0),
    ],
)
def test_counters_may_start_step_and_compare_as_they_like(start, go, step, trips):
    def body(x):
        more = lambda c: (c[0] + step, lax.psum(c[1], "data") * 0.1)
        return lax.while_loop(lambda c: go(c[0]), more, (start, x))[1]

    assert collectives(lowered(body, X)).count() == trips


def test_a_loop_of_unknown_length_counts_once_and_says_so():
    def body(x):
        return lax.while_loop(lambda c: c.sum() < 100, lambda c: lax.psum(c, "data"), x)

    program = lowered(body, X)
    for row in (only(program), only(program.compile())):
        assert (row.count, row.where) == (1, "loop of unknown length")


def test_a_step_that_is_not_constant_is_of_unknown_length_or_read_off_the_condition():
    def body(x):
        more = lambda c: (c[0] + c[1].max().astype(int), lax.psum(c[1], "data"))
        return lax.while_loop(lambda c: c[0] < 9, more, (0, x))[1]

    program = lowered(body, X)
    assert only(program).where == "loop of unknown length"
    assert only(program.compile()).where in ("loop of 9 by its condition", "loop of unknown length")


def test_a_loop_condition_runs_once_more_than_its_body():
    def body(x):
        go = lambda c: (c[0] < 4) & (lax.psum(c[1], "data") > 0).any()
        return lax.while_loop(lambda c: go(c), lambda c: (c[0] + 1, c[1]), (0, x))[1]

    assert only(lowered(body, X)).where == "loop of unknown length"
    counted = hlo.loop(4, [], [hlo.Transfer("all-reduce", ((0, 1),), "float32", (2,))])
    assert [t.count for t in counted] == [5]


def test_of_a_cond_the_heaviest_branch_counts():
    def body(x):
        heavy = lambda x: gather(x, "fsdp")[:8]
        return lax.cond(x.sum() > 0, heavy, lambda x: lax.psum(x, "data"), x)

    program = lowered(body, X)
    for row in (only(program), only(program.compile())):
        assert (row.kind, row.where) == ("all-gather", "heaviest of 2 branches")


def layers(x, ws, wrap):
    """A scan over layers whose weights are gathered in each, as FSDP does."""

    def layer(h, w):
        return jnp.tanh(h @ gather(w, "fsdp")), None

    return lax.scan(wrap(layer), x, ws)[0]


@pytest.mark.parametrize(
    ("wrap", "gathers"), [(lambda f: f, 6), (jax.checkpoint, 12)], ids=["kept", "rematerialised"]
)
def test_the_gradient_of_a_scan_scatters_once_and_gathers_again_if_it_recomputes(wrap, gathers):
    def body(x, ws):
        return jax.grad(lambda ws: layers(x, ws, wrap).sum())(ws)

    program = lowered(body, array(8, 32), array(6, 16, 32))
    counted = collectives(program)
    assert counted.count("all-gather", "fsdp") == gathers
    assert counted.count("reduce-scatter", "fsdp") == 6
    assert counted.total("reduce-scatter") == 6 * 32 * 32 * 4
    compiled = collectives(program.compile())
    assert compiled.total("reduce-scatter") == counted.total("reduce-scatter")


# --- the two sources ------------------------------------------------------------------------------


def test_lowered_and_compiled_agree_on_what_was_written_by_hand():
    def body(x):
        y = lax.psum(x, "data") + lax.psum_scatter(gather(x, "fsdp"), "fsdp", tiled=True)
        y = twice_nested(y + lax.ppermute(y, "tensor", [(0, 1), (1, 0)]))
        return lax.all_to_all(y, "data", 0, 0, tiled=True)

    program = lowered(body, X)
    written, ran = collectives(program), collectives(program.compile())
    for kind in hlo.KINDS.values():
        for axis in NAMES:
            assert written.total(kind, axis) == ran.total(kind, axis), (kind, axis)
    assert (written.total(), written.moved) == (ran.total(), ran.moved)
    assert (written.source, ran.source) == ("stablehlo", "compiled for cpu")


def test_the_partitioners_all_reduce_is_compiled_but_not_lowered():
    mesh = cube()
    place = lambda *spec: NamedSharding(mesh, P(*spec))
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=place("data", "tensor"))
    w = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=place("tensor"))
    program = jax.jit(jnp.matmul, out_shardings=place("data")).lower(x, w)
    assert len(collectives(program)) == 0
    row = only(program.compile())
    assert (row.kind, row.axes, row.bytes) == ("all-reduce", ("tensor",), 4 * 32 * 4)


def lowered_beside_tensor(body, out):
    """`body` of one 16x32 weight, manual over data and fsdp while tensor stays automatic."""
    mesh = cube()
    options = {"axis_names": {"data", "fsdp"}, "check_vma": False}
    manual = jax.shard_map(body, mesh=mesh, in_specs=P("fsdp"), out_specs=P(out), **options)
    w = jax.ShapeDtypeStruct(
        (16, 32), jnp.float32, sharding=NamedSharding(mesh, P("fsdp", "tensor"))
    )
    return jax.jit(manual, out_shardings=NamedSharding(mesh, P(out, "tensor"))).lower(w)


def test_an_automatic_axis_is_divided_out_of_compiled_bytes_only():
    program = lowered_beside_tensor(lambda w: lax.psum(w, "fsdp"), "fsdp")
    assert only(program).bytes == 8 * 32 * 4
    assert only(program.compile()).bytes == 8 * 32 * 4 // 2


def test_a_gather_inside_a_nested_shard_map_over_the_tensor_axis_is_local_in_both():
    def body(w):
        options = {"axis_names": {"tensor"}, "check_vma": False}
        local, spec = lambda w: gather(w, "fsdp"), P(None, "tensor")
        return jax.shard_map(local, in_specs=spec, out_specs=spec, **options)(w)

    program = lowered_beside_tensor(body, None)
    for row in (only(program), only(program.compile())):
        assert (row.axes, row.shape, row.bytes) == (("fsdp",), (16, 16), 16 * 16 * 4)


# --- the table ------------------------------------------------------------------------------------


def test_the_table_is_plain_text_with_the_most_bytes_first():
    def body(x):
        return lax.psum(gather(x, "fsdp")[:8], ("data", "tensor")) + twice_nested(x)

    assert str(collectives(lowered(body, X))) == (
        "collectives of one call, per device (stablehlo)\n"
        "kind        axes         payload           bytes  count    total  where\n"
        "all-reduce  data         float32[8,16]     512 B     15  7.5 KiB  loop of 5 > loop of 3\n"
        "all-reduce  fsdp         float32[8,16]     512 B      5  2.5 KiB  loop of 5\n"
        "all-gather  fsdp         float32[16,16]  1.0 KiB      1  1.0 KiB\n"
        "all-reduce  data,tensor  float32[8,16]     512 B      1    512 B\n"
        "22 calls, payload 11.5 KiB, moved 11.2 KiB"
    )


def test_a_program_that_sends_nothing_says_none():
    counted = collectives(jax.jit(jnp.sin).lower(1.0))
    assert (len(counted), counted.total(), counted.moved) == (0, 0, 0)
    assert str(counted) == "collectives of one call, per device (stablehlo): none"


def test_equal_rows_are_merged_and_rows_can_be_indexed_and_iterated():
    counted = collectives(lowered(lambda x: lax.psum(lax.psum(x, "data") * 2, "data"), X))
    assert isinstance(counted, Collectives)
    assert (len(counted), counted[0].count, next(iter(counted))) == (1, 2, counted[0])


@pytest.mark.parametrize("wrong", [jnp.sin, "HloModule", None])
def test_anything_but_a_lowered_or_compiled_program_is_refused(wrong):
    with pytest.raises(ValueError, match=r"allowed are jax\.stages\.Lowered .* pass jax\.jit"):
        collectives(wrong)


def test_an_unknown_kind_is_refused_with_the_kinds_there_are():
    with pytest.raises(ValueError, match="'psum'; allowed are all-gather, reduce-scatter"):
        Collectives((), "stablehlo").total("psum")


# --- spellings of HLO -----------------------------------------------------------------------------


def module(*lines, more=""):
    return "\n".join(
        [
            "HloModule m, is_scheduled=true, num_partitions=8",
            more,
            "ENTRY %main (p: f32[4,8]) -> f32[4,8] {",
            "  %p = f32[4,8]{1,0:T(8,128)} parameter(0)",
            *(f"  {line}" for line in lines),
            "}",
        ]
    )


@pytest.mark.parametrize(
    ("spelling", "groups"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("[4,2]<=[8]", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[1,8]<=[8]", (tuple(range(8)),)),
        ("{}", (tuple(range(8)),)),
        ("mesh['a'=2,'b'=2,'c'=2] {'b'}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh[a=2,b=4] {a,b:(2)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([2,4]<=[4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,1,3,4,5,6,7) {'a'}", ((0, 4), (2, 5), (1, 6), (3, 7))),
    ],
)
def test_every_spelling_of_device_groups_is_read(spelling, groups):
    tail = "use_global_device_ids=true, to_apply=%add"
    line = (
        f"ROOT %r = f32[4,8]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={spelling}, {tail}"
    )
    (found,) = hlo.transfers(module(line))
    assert set(map(frozenset, found.groups)) == set(map(frozenset, groups))


def test_without_global_ids_a_group_of_replicas_means_all_their_devices():
    line = "ROOT %r = f32[4,8]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0}}"
    assert hlo.transfers(module(line))[0].groups == (tuple(range(8)),)


@pytest.mark.parametrize(
    "result",
    [
        "(f32[4,8]{1,0}, f32[8,8]{1,0})",
        "((f32[4,8]{1,0}), f32[8,8]{1,0})",
        "((f32[4,8]{1,0}), (f32[8,8]{1,0}))",
    ],
)
def test_a_start_and_its_done_are_one_gather_of_the_result(result):
    found = hlo.transfers(
        module(
            f"%s = {result} all-gather-start(%p), replica_groups=[4,2]<=[8], dimensions={{0}}, "
            "use_global_device_ids=true",
            "ROOT %d = f32[8,8]{1,0} all-gather-done(%s), calls=%nothing",
        )
    )
    assert [(t.kind, t.shape, t.bytes, t.count) for t in found] == [("all-gather", (8, 8), 256, 1)]


def test_every_operand_of_a_combined_collective_is_its_own():
    found = hlo.transfers(
        module(
            "%q = bf16[16]{0} parameter(1)",
            "ROOT %r = (f32[4,8]{1,0}, bf16[16]{0}) all-reduce(%p, /*index=1*/%q), "
            "replica_groups=[1,8]<=[8], use_global_device_ids=true, to_apply=%add",
        )
    )
    assert [(t.dtype, t.shape, t.bytes) for t in found] == [
        ("float32", (4, 8), 128),
        ("bfloat16", (16,), 32),
    ]


def test_an_asynchronous_computation_counts_at_its_start_only():
    wrapped = (
        "%wrapped (q: f32[4,8]) -> f32[2,8] {\n"
        "  %q = f32[4,8]{1,0} parameter(0)\n"
        "  ROOT %rs = f32[2,8]{1,0} reduce-scatter(%q), channel_id=1, replica_groups=[4,2]<=[8], "
        "use_global_device_ids=true, dimensions={0}, to_apply=%add\n"
        '}, execution_thread="parallel"\n'
    )
    found = hlo.transfers(
        module(
            "%s = ((f32[4,8]{1,0}), f32[2,8]{1,0}, u32[]) async-start(%p), calls=%wrapped",
            "%u = ((f32[4,8]{1,0}), f32[2,8]{1,0}, u32[]) async-update(%s), calls=%wrapped",
            "ROOT %d = f32[2,8]{1,0} async-done(%u), calls=%wrapped",
            more=wrapped,
        )
    )
    assert [(t.kind, t.shape, t.count) for t in found] == [("reduce-scatter", (4, 8), 1)]


def test_a_send_between_devices_is_a_permute_and_a_send_to_the_host_is_not():
    found = hlo.transfers(
        module(
            "%t = token[] after-all()",
            "%s = (f32[4,8]{1,0}, u32[], token[]) send(%p, %t), channel_id=1, "
            "frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,2}}}",
            "%d = token[] send-done(%s), channel_id=1",
            "%h = (f32[4,8]{1,0}, u32[], token[]) send(%p, %t), is_host_transfer=true",
        )
    )
    assert [(t.kind, t.groups, t.shape) for t in found] == [("permute", ((0, 1), (1, 2)), (4, 8))]


LOOP = """
%less (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}

%condition (t: (s32[], f32[4,8])) -> pred[] {
  %t = (s32[], f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] constant(9)
  ROOT %c = pred[] fusion(%i, %n), kind=kLoop, calls=%less
}

%body (t: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %t = (s32[], f32[4,8]{1,0}) parameter(0)
  %x = f32[4,8]{1,0} get-tuple-element(%t), index=1
  %y = f32[4,8]{1,0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,0},{2,2}}
  ROOT %r = (s32[], f32[4,8]{1,0}) tuple(%i, %y)
}
"""


@pytest.mark.parametrize(
    ("config", "count", "where"),
    [
        ('{"known_trip_count":{"n":"5"},"note":"a } b"}', 5, "loop of 5"),
        ('{"dynamic_variables":[]}', 9, "loop of 9 by its condition"),
        ("none", 9, "loop of 9 by its condition"),
    ],
)
def test_a_while_runs_as_often_as_xla_says_or_as_its_condition_does(config, count, where):
    line = "ROOT %w = (s32[], f32[4,8]{1,0}) while(%z), condition=%condition, body=%body"
    (found,) = hlo.transfers(module(f"{line}, backend_config={config}", more=LOOP))
    assert (found.count, found.where, found.groups) == (count, where, ((0, 1), (1, 0)))


def test_a_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.transfers("{}")


# --- H200s, without one ---------------------------------------------------------------------------


@pytest.mark.cuda
def test_compiled_for_h200s_both_planes_show_and_bfloat16_stays():
    devices = np.array(h200s()).reshape(2, 2, 2)
    mesh = jax.sharding.Mesh(devices, NAMES, axis_types=(AxisType.Auto,) * 3)

    def body(x, w):
        step = lambda h, w: (jnp.tanh(h @ gather(w.astype(jnp.bfloat16), "fsdp")), None)
        return lax.scan(jax.checkpoint(step), x, w)[0]

    def loss(w, x):
        specs = (P(("data", "fsdp")), P(None, "fsdp"))
        options = {"axis_names": {"data", "fsdp"}, "check_vma": False}
        f = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[0], **options)
        return jnp.sum(f(x, w).astype(jnp.float32) ** 2)

    place = lambda spec, dtype, *shape: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, spec)
    )
    w = place(P(None, "fsdp", "tensor"), jnp.float32, 6, 512, 512)
    x = place(P(("data", "fsdp")), jnp.bfloat16, 64, 512)
    program = jax.jit(jax.grad(loss), out_shardings=w.sharding).lower(w, x)
    written, ran = collectives(program), collectives(program.compile())
    assert ran.source == "compiled for gpu"
    assert written.count("all-gather", "fsdp") == ran.count("all-gather", "fsdp") == 12
    assert {row.dtype for row in ran if row.kind == "all-gather"} == {"bfloat16"}
    assert ran.count("reduce-scatter", "fsdp") == written.count("reduce-scatter", "fsdp") == 6
    assert written.count(axes="tensor") == 0 < ran.count(axes="tensor")
