"""Which collective bytes run under a matmul: a schedule by hand, and a step compiled for H200s."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest

import hfjax
from hfjax.analysis import overlap as schedule
from hfjax.hardware.machine import H200
from hfjax.models.attention import dot_product
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from hfjax.parallel.compiler_options import PRESETS, compiler_options, cpu_options
from hfjax.parallel.execution import Execution
from hfjax.sharding import xla_options
from hfjax.sharding.xla_options import options_for
from tests.h200 import OPTIMIZED, h200s
from tests.small_gpt import gpt_layout, tokens

MESH = {"data": 2, "tensor": 4}
FLOP = 2 * 1024**3  # of one matmul below
MIB = 2**20
EIGHT = "replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true"
FOUR = "replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true"
GATHER = (
    "(bf16[1024,1024]{1,0}, bf16[4096,1024]{1,0}) all-gather-start(%x), dimensions={0}, " + FOUR
)
DONE = "bf16[4096,1024]{1,0} all-gather-done"
MATMUL = "bf16[1024,1024]{1,0} fusion(%x, %x), kind=kCustom, calls=%gemm"
CUBLAS = (
    'bf16[1024,1024]{1,0} custom-call(%x, %x), custom_call_target="__cublas$gemm", '
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[]}}}'
)
BATCHED = "f32[8,16,32] dot(%l, %r), lhs_batch_dims={0}, lhs_contracting_dims={2}"
X = "bf16[1024,1024]{1,0} parameter(0)"


def module(*entry, body=(), trips=3):
    """A scheduled module whose entry holds `name = …` lines, with one loop body and one matmul."""
    text = ["HloModule m, is_scheduled=true, num_partitions=8", ""]
    text += ["%gemm (a: bf16[1024,1024], b: bf16[1024,1024]) -> bf16[1024,1024] {"]
    text += ["  %a = bf16[1024,1024]{1,0} parameter(0)", "  %b = bf16[1024,1024]{1,0} parameter(1)"]
    text += ["  ROOT %d = bf16[1024,1024]{1,0} dot(%a, %b), lhs_contracting_dims={1}", "}", ""]
    text += ["%body (x: bf16[1024,1024]) -> bf16[1024,1024] {", f"  %x = {X}"]
    text += [*(f"  %{line}" for line in body), "}", "", "%cond (c: s32[]) -> pred[] {", "}", ""]
    text += ["ENTRY %main (x: bf16[1024,1024]) -> bf16[1024,1024] {", f"  %x = {X}"]
    text += [*(f"  %{line.replace('TRIPS', str(trips))}" for line in entry), "}"]
    return "\n".join(text)


LOOP = (
    "w = bf16[1024,1024] while(%x), condition=%cond, body=%body, "
    'backend_config={"known_trip_count":{"n":"TRIPS"}}'
)


def flights(*entry, **more):
    return schedule.read_schedule(module(*entry, **more), [MESH])


def test_a_gather_with_a_matmul_before_its_done_is_hidden_and_covered_as_far_as_that_lasts():
    (f,) = flights(f"s = {GATHER}", f"m = {MATMUL}", f"t = {DONE}(%s)")
    assert (f.kind, f.axes, f.bytes, f.count) == ("all-gather", ("tensor",), 8 * MIB, 1)
    assert f.flops == FLOP
    assert f.hidden == f.total == 8 * MIB
    assert f.seconds == 6 * MIB / H200.inside  # by a ring a device sends 3 of 4 parts
    assert f.covered == pytest.approx(FLOP / H200.scheduled_flops / f.seconds)
    assert f.exposed == pytest.approx(f.seconds - FLOP / H200.scheduled_flops)


@pytest.mark.parametrize(
    "entry",
    [
        (f"m = {MATMUL}", f"s = {GATHER}", f"t = {DONE}(%s)", f"n = {MATMUL}"),
        (f's = {GATHER}, backend_config={{"is_sync":true}}', f"m = {MATMUL}", f"t = {DONE}(%s)"),
        (f"s = bf16[4096,1024] all-gather(%x), dimensions={{0}}, {FOUR}", f"m = {MATMUL}"),
        (f"s = {GATHER}", "c = bf16[1024,1024] copy(%x)", f"t = {DONE}(%s)"),
    ],
    ids=["matmuls only outside", "marked synchronous", "without a start", "a copy between"],
)
def test_exposed(entry):
    (f,) = flights(*entry)
    assert (f.total, f.hidden, f.covered) == (8 * MIB, 0, 0)


ACROSS = "replica_groups={{0,8},{1,9},{2,10},{3,11},{4,12},{5,13},{6,14},{7,15}}"
WITHIN = "replica_groups={{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}"
ALL = "replica_groups=[1,16]<=[16]"


@pytest.mark.parametrize(
    ("groups", "axes", "link"),
    [
        (WITHIN, ("fsdp",), "inside"),
        (ACROSS, ("data",), "between"),
        (ALL, ("data", "fsdp"), "between"),
    ],
    ids=["in nodes", "one of each", "all"],
)
def test_what_crosses_nodes_goes_at_the_speed_between_them(groups, axes, link):
    start = f"s = f32[1024,1024] all-reduce-start(%x), {groups}, use_global_device_ids=true"
    text = module(start, "t = f32[1024,1024] all-reduce-done(%s)")
    text = text.replace("num_partitions=8", "num_partitions=16")
    (f,) = schedule.read_schedule(text, [{"data": 2, "fsdp": 8}])
    devices = math.prod({"fsdp": 8, "data": 2}[axis] for axis in axes)
    assert f.axes == axes
    moved = 2 * (devices - 1) * f.bytes // devices
    assert f.seconds == pytest.approx(moved / getattr(H200, link))


def test_a_small_matmul_covers_a_little_but_hides_nothing():
    small = "l = f32[8,16,64] parameter(1)", "r = f32[8,64,32] parameter(2)", f"m = {BATCHED}"
    (f,) = flights(*small[:2], f"s = {GATHER}", small[2], f"t = {DONE}(%s)")
    assert f.flops == 2 * 8 * 16 * 64 * 32
    assert f.hidden == 0 < f.covered < 0.1


def test_a_matmul_is_shared_out_in_the_order_of_the_starts():
    between = [f"m{i} = {MATMUL}" for i in range(6)]
    both = flights(f"s = {GATHER}", f"u = {GATHER}", *between, f"t = {DONE}(%s)", f"v = {DONE}(%u)")
    seconds = 6 * FLOP / H200.scheduled_flops
    assert [f.hidden for f in both] == [8 * MIB, 8 * MIB]
    assert both[0].covered == pytest.approx(1)
    assert both[1].covered == pytest.approx(seconds / both[1].seconds - 1)


def test_a_loop_multiplies_its_collectives_and_hides_those_around_it():
    body = f"s = {GATHER}", f"m = {CUBLAS}", f"t = {DONE}(%s)"
    outer = "r = f32[1024,1024] all-reduce-start(%x), " + EIGHT
    inside, around = flights(outer, LOOP, "q = f32[1024,1024] all-reduce-done(%r)", body=body)
    assert (inside.count, inside.hidden, inside.flops) == (3, 24 * MIB, FLOP)
    assert (around.kind, around.axes, around.count) == ("all-reduce", ("data", "tensor"), 1)
    assert around.flops == 3 * FLOP


def test_a_program_without_a_schedule_is_refused():
    text = module().replace("is_scheduled=true, ", "")
    for read in (lambda text: schedule.read_schedule(text, [MESH]), schedule.products):
        with pytest.raises(ValueError, match="not a scheduled module"):
            read(text)


def test_slower_matmuls_cover_more():
    entry = f"s = {GATHER}", f"m = {MATMUL}", f"t = {DONE}(%s)"
    (f,) = flights(*entry)
    slower = replace(H200, scheduled_flops=H200.scheduled_flops / 2)
    (slow,) = schedule.read_schedule(module(*entry), [MESH], slower)
    assert slow.covered == pytest.approx(2 * f.covered)


def test_products_are_read_by_shape_loops_multiplied_out():
    small = "l = f32[8,16,64] parameter(1)", "r = f32[8,64,32] parameter(2)"
    batched = BATCHED.replace("_dims={2}", "_dims={2}, rhs_batch_dims={0}")
    entry = *small, f"m = {batched}", LOOP, f"o = {MATMUL}"
    found = schedule.products(module(*entry, body=(f"m = {CUBLAS}", f"n = {MATMUL}")))
    square = schedule.Matmul(1, 1024, 1024, 1024, 3 * 2 * MIB, count=7)  # 2 x 3 turns, and 1
    batch = schedule.Matmul(8, 16, 32, 64, 4 * 8 * (16 * 64 + 64 * 32 + 16 * 32))
    assert sorted(found, key=lambda p: p.batch) == [square, batch]
    assert [p.flops for p in found] == [2 * 8 * 16 * 32 * 64, FLOP]


# --- compiler options ---------------------------------------------------------------------


def test_a_preset_is_for_gpus_only():
    assert compiler_options("overlap", "gpu") == dict(PRESETS["overlap"])
    assert compiler_options("overlap", "cpu") == compiler_options("overlap", "tpu") == {}


@pytest.mark.parametrize(
    ("strategy", "sizes", "preset"),
    [
        (hfjax.DDP, {"data": 8}, "default"),
        (hfjax.ZERO1, {"fsdp": 8}, "default"),  # parameters are whole
        (hfjax.FSDP, {"fsdp": 8}, "overlap_two"),
        (hfjax.HSDP, {"data": 2, "fsdp": 4}, "overlap_two"),
        (hfjax.TENSOR | hfjax.SEQUENCE, {"data": 2, "tensor": 4}, "overlap_two"),
        (hfjax.FSDP | hfjax.TENSOR, {"fsdp": 2, "tensor": 4}, "overlap"),
        (hfjax.PIPE, {"pipe": 8}, "default"),
        (hfjax.PIPE | hfjax.TENSOR, {"pipe": 4, "tensor": 2}, "overlap_two"),
    ],
)
def test_a_step_on_gpus_takes_the_preset_that_was_measured_best(
    strategy, sizes, preset, monkeypatch
):
    layout = gpt_layout(strategy.edit(replicate_below=0), sizes, layers=8)
    assert options_for(layout, Execution()) == cpu_options(8)
    monkeypatch.setattr(xla_options, "platform_of", lambda mesh: "gpu")
    assert options_for(layout, Execution()) == (PRESETS[preset] or None)
    assert options_for(layout, Execution(compiler_options="default")) is None
    monkeypatch.setattr(jax, "__version_info__", (0, 13, 0))
    assert options_for(layout, Execution()) is None


def test_own_options_are_kept_where_they_mean_something():
    own = {"xla_gpu_enable_pipelined_all_gather": True, "xla_cpu_enable_fast_math": False}
    assert compiler_options(own, "cuda") == own
    assert compiler_options(own, "cpu") == {"xla_cpu_enable_fast_math": False}


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(ValueError, match="'fast': one of auto, default, overlap, overlap_two"):
        compiler_options("fast", "gpu")
    for wrong in ("AUTO", "", None, 5, ["auto"]):
        with pytest.raises(ValueError, match="one of auto, default"):
            Execution(compiler_options=wrong)


# --- H200s, without one -------------------------------------------------------------------


def step(options):
    """A four-layer GPT's step under FSDP, compiled for 8 H200s."""
    mesh = hfjax.make_mesh(devices=h200s(), fsdp=8)
    attention = partial(dot_product, implementation="xla")
    shape = {"vocab": 1024, "length": 512, "layers": 4, "heads": 8, "embed": 512}
    config = GPTConfig(**shape, attention=attention)
    plan = hfjax.layout(lambda rngs: GPT(config, rngs=rngs), optax.adam(1e-3), mesh, hfjax.FSDP)
    options = compiler_options(options, "gpu") | OPTIMIZED
    train = hfjax.train_step(plan, next_token_loss, precision="bf16", compiler_options=options)
    batch = {"tokens": jax.ShapeDtypeStruct((64, 513), jnp.int32)}
    return schedule.flights(train.lower(batch).compile())


@pytest.mark.cuda
def test_the_preset_hides_more_gathers_than_xla_does_unasked_and_sends_the_same_bytes():
    before, after = step("default"), step("overlap_two")
    gathers = lambda flights: sum(f.hidden for f in flights if f.kind == "all-gather")
    assert sum(f.total for f in before) == sum(f.total for f in after)
    assert gathers(before) < gathers(after)


@pytest.mark.cuda
def test_on_gpus_layers_follow_each_other_without_a_loop():
    layout = gpt_layout(hfjax.DDP, {"data": 1}, devices=h200s(1))
    steps = [hfjax.train_step(layout, next_token_loss, unroll=unroll) for unroll in (None, 1)]
    loops = [step.lower(tokens()).as_text().count("stablehlo.while") for step in steps]
    assert loops == [0, 2]


@pytest.mark.cuda
def test_a_pipeline_sums_gradients_of_layers_beside_its_last_backward_pass():
    sizes, shape = {"pipe": 4, "data": 2}, {"length": 256, "embed": 512, "layers": 16}
    layout = gpt_layout(hfjax.PIPE, sizes, devices=h200s(), **shape)
    options = {"schedule": hfjax.Schedule("1f1b", 8), "remat": "dots"}
    train = hfjax.train_step(layout, next_token_loss, **options)
    batch = {"tokens": jax.ShapeDtypeStruct((128, 257), jnp.int32)}
    found = schedule.flights(train.lower(batch).compile(OPTIMIZED))
    sums = [f for f in found if f.axes == ("data",)]
    layers = [p for path, p in layout.param_specs.items() if path.startswith("layers/")]
    assert sum(f.total for f in sums) == sum(4 * math.prod(p.shape) for p in layers) // 4
    assert sum(f.total for f in sums if f.flops) > sum(f.total for f in sums) // 2
