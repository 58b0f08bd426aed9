"""`hfjax memory`: what a step takes is told before anything runs, beside alternatives."""

import importlib
import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from rich.console import Console

from hfjax.analysis.residuals import saved_residuals
from hfjax.analysis.search_offload import least_offload
from hfjax.analysis.targets import GPUS, can_compile_for_gpus
from hfjax.cli.memory import command as memory_command, plot as memory_picture
from hfjax.cli.memory.command import main as command, report
from hfjax.cli.memory.settings import (
    Memory,
    OffloadOptions,
    alternatives,
    apply_changes,
    memory_settings,
    with_offload,
)
from hfjax.cli.memory.table import table
from hfjax.planner.programs.planned_run import PlannedRun
from hfjax.trainer.config import (
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    TrainConfig,
)
from hfjax.utils.tables import parse_bytes
from tests.h200 import h200s
from tests.small_run import STACK, corpus

ROOT = Path(__file__).parents[1]
LAYERS, LENGTH, EMBED, ROWS = 3, 16, 32, 2  # rows on each device
MODEL = ModelConfig(
    preset="gpt-tiny", seq_len=LENGTH, num_layers=LAYERS, num_heads=2, hidden_size=EMBED
)
GIVEN = Memory(
    model=MODEL,
    global_batch_size=8 * ROWS,
    mesh=MeshConfig(fsdp=-1),
    vocab=64,
    gpu="here",
    compare=(),
)
CARRY = ROWS * LENGTH * EMBED * 4  # what enters a layer
OF_MLPS = replace(GIVEN, model=STACK)  # two layers, twice as wide; compiled in half of the time
CARRY_OF_MLPS = 2 * CARRY


def stashed(loss):
    found = saved_residuals(jax.jit(jax.grad(loss)).trace(jnp.zeros((8, 4))))
    assert found is not None
    return found


def estimates(given) -> dict[str, Any]:
    return {e.name: e for e in report(given).estimates}


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """Write a file for each text; return the settings that compare them."""

    def compare(given: Memory, *texts: str) -> Memory:
        folder = tmp_path_factory.mktemp("compared")
        paths = tuple(folder / f"{n}.yaml" for n in range(len(texts)))
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text, encoding="utf-8")
        return replace(given, compare=paths)

    return compare


# --- what waits for the backward pass -------------------------------------------------------------


def test_a_layer_keeps_what_its_pullback_reads_and_a_scan_stacks_it():
    layer = lambda c, _: (jnp.sin(c), None)
    loss = lambda x: lax.scan(layer, x, None, length=5)[0].sum()
    (kept,) = stashed(loss)
    assert (kept.dtype, kept.shape, kept.bytes, kept.count) == ("float32", (8, 4), 128, 5)
    assert (kept.layers, kept.host, kept.total) == (True, False, 640)


def test_what_does_not_depend_on_an_input_is_not_kept():
    loss = lambda x: (jnp.sin(x) * jnp.full((8, 4), 3.0)).sum()
    assert [(kept.shape, kept.layers) for kept in stashed(loss)] == [((8, 4), False)]  # cos(x)


def test_a_program_without_a_backward_pass_keeps_nothing_that_is_known():
    assert saved_residuals(jax.jit(jnp.sin).trace(jnp.zeros(3))) is None


# --- the numbers ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(beside):
    full = replace(OF_MLPS, remat="full")
    given = beside(full, "remat: none", "remat: none\noffload: 1")  # one of today, one of before
    with pytest.warns(UserWarning, match=r"1\.yaml has the fields of an earlier hfjax"):
        return report(given)


@pytest.mark.slow
def test_the_state_is_told_as_the_layout_has_it(compared):
    told = PlannedRun(OF_MLPS, vocab=64).layout.bytes_per_device()
    for e in compared.estimates:
        assert {name: getattr(e, name) for name in told} == told
        assert (e.master, e.host_parameters, e.host_optimizer_state, e.host_master) == (0, 0, 0, 0)


def test_recomputed_layers_keep_what_enters_them(compared):
    assert compared.estimates[0].layers == 2 * CARRY_OF_MLPS


def test_what_is_offloaded_waits_on_the_host_and_is_sent_there_and_back(compared):
    assert [e.name for e in compared.estimates] == ["remat=full", "0.yaml", "1.yaml"]
    _, none, offloaded = compared.estimates
    assert none.layers > 10 * 2 * CARRY_OF_MLPS
    assert (none.host_stashes, none.to_host, none.to_device) == (0, 0, 0)
    planned = PlannedRun(with_offload(OF_MLPS, "1"), vocab=64)
    planned.step.trace(planned.batch)
    moved = planned.step.offloaded.host_bytes
    assert moved > 0.8 * none.layers  # views are made again
    assert offloaded.layers == 0
    assert offloaded.host_stashes == offloaded.to_host == offloaded.to_device == moved


def test_updated_in_the_backward_pass_a_layer_and_the_ends_have_gradients_at_once(beside):
    """The loop is written out: it does not tell what it keeps."""
    changes = "optimizer: {max_grad_norm: null, in_backward: true}"
    whole, small = estimates(beside(OF_MLPS, changes)).values()
    sizes = PlannedRun(OF_MLPS, vocab=64).layout.gradient_bytes
    layers = sum(size for path, size in sizes.items() if path.startswith("layers/"))
    assert whole.gradients - small.gradients == layers - layers // 2
    assert whole.layers is not None
    assert small.layers is None


@pytest.mark.slow
def test_the_state_on_the_host_is_told_apart(beside):
    changes = "offload: {optimizer: true, parameters: true}\nmaster_weights: true"
    here, there = estimates(beside(OF_MLPS, changes)).values()
    counts = 8  # of updates; they stay on the device
    assert (there.parameters, there.optimizer_state, there.master) == (0, counts, 0)
    assert there.host_parameters == here.parameters // 2  # bfloat16
    assert there.host_optimizer_state == here.optimizer_state - counts
    assert there.host_master == here.parameters


def test_peak_is_arguments_and_temporaries(compared):
    for e in compared.estimates:
        assert 0 <= e.peak - e.arguments - e.temporaries < 1024  # metrics, and a table of pointers
        assert e.platform == "cpu"


@pytest.mark.slow
def test_microbatches_keep_as_much_as_one_of_them(beside):
    full = replace(OF_MLPS, remat="full")
    whole, split = estimates(beside(full, "gradient_accumulation_steps: 2")).values()
    assert whole.layers == 2 * split.layers


@pytest.mark.slow
def test_the_stages_of_a_pipeline_keep_all_slots_of_their_rings():
    """1F1B on two stages keeps three microbatches; each has one layer's input for two layers."""
    deep = ModelConfig(factory=f"{ROOT}/tests/small_model.py:deep", seq_len=LENGTH)
    piped = replace(GIVEN, model=deep, mesh=MeshConfig(pipe=2), remat="full")
    pipeline = PipelineConfig("1f1b", microbatches=8)
    given = replace(piped, global_batch_size=4 * 8 * ROWS, pipeline=pipeline)
    (e,) = estimates(given).values()
    assert e.layers == 3 * 2 * CARRY_OF_MLPS
    assert e.messages % CARRY_OF_MLPS == 0
    assert e.messages >= 3 * CARRY_OF_MLPS


@pytest.mark.slow
def test_in_a_pipeline_the_rings_lie_on_the_host_as_far_as_they_are_offloaded(beside):
    piped = replace(OF_MLPS, mesh=MeshConfig(pipe=2))
    pipeline = PipelineConfig("1f1b", microbatches=4)
    given = replace(piped, global_batch_size=4 * 4 * ROWS, pipeline=pipeline)
    here, there = estimates(beside(given, "offload: {activations: 1}")).values()
    assert (here.host_stashes, there.layers) == (0, 0)
    assert 0.9 * here.layers < there.host_stashes <= here.layers  # views are made again
    assert there.to_host % (there.host_stashes // 3) == 0  # slots of three microbatches


@pytest.mark.slow
def test_frozen_parameters_have_no_gradients():
    optimizer = OptimizerConfig(frozen=("layers/*",))
    frozen = replace(OF_MLPS, mesh=MeshConfig(), optimizer=optimizer)
    (e,) = estimates(frozen).values()
    assert e.gradients < e.parameters / 4


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_a_planned_batch_has_the_shapes_of_the_loaders(tmp_path, packing):
    data = DataConfig(train=(str(corpus(tmp_path)),), packing=packing)
    parts = PlannedRun(replace(GIVEN, vocab=None, data=data))
    shapes = lambda batch: {name: (x.shape, x.dtype) for name, x in batch.items()}
    assert shapes(parts.batch) == shapes(parts.data.at(0))
    parts.step.trace(parts.batch)


# --- alternatives ---------------------------------------------------------------------------------


def test_without_compare_every_remat_and_two_ratios_stand_beside():
    names = [name for name, _ in alternatives(replace(GIVEN, compare=None))]
    offloads = ["remat=none,offload=0.5", "remat=none,offload=1"]
    assert names == ["remat=none", "remat=dots", "remat=full", *offloads, "offload.optimizer"]
    *_, last = alternatives(replace(GIVEN, compare=None))
    assert last[1] == replace(GIVEN, compare=None, offload=OffloadOptions(optimizer=True))


def test_beside_an_offload_every_remat_stands_without_it_and_the_other_ratio():
    given = replace(GIVEN, compare=None, offload=OffloadOptions("0.5", optimizer=True))
    found = {name: (x.remat, x.offload) for name, x in alternatives(given)}
    assert found == {
        "remat=none,offload=0.5": ("none", given.offload),
        **{f"remat={x}": (x, OffloadOptions(optimizer=True)) for x in ("none", "dots", "full")},
        "remat=none,offload=1": ("none", OffloadOptions("1", optimizer=True)),
    }


def changed(given: Memory, folder: Path, text: str) -> Memory:
    path = folder / "changes.yaml"
    path.write_text(text, encoding="utf-8")
    return apply_changes(given, path)


def test_compare_changes_any_setting_and_keeps_the_rest(tmp_path):
    other = changed(GIVEN, tmp_path, "optimizer: {max_grad_norm: null}")
    assert other == replace(GIVEN, optimizer=OptimizerConfig(max_grad_norm=None)) != GIVEN
    text = "remat: full\nmodel: {num_layers: 5}\noptimizer: {weight_decay: 0.5}"
    other = changed(GIVEN, tmp_path, text)
    assert (other.remat, other.model.num_layers, other.optimizer.weight_decay) == ("full", 5, 0.5)
    assert replace(other, remat="none", model=MODEL, optimizer=GIVEN.optimizer) == GIVEN
    other = changed(GIVEN, tmp_path, "mesh: {tensor: 2}\noffload: {activations: 0.5}")
    assert other.mesh == MeshConfig(fsdp=-1, tensor=2)
    assert other.offload == OffloadOptions("0.5")
    assert changed(GIVEN, tmp_path, "") == GIVEN


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("remat", "fields with values are expected, found 'remat'"),
        ("seed: 1\nmodel:\n  colour: red", r":3: model: no field 'colour'\. Nearest"),
        ("remat: {full: 1}", r":1: remat=.*a text is expected"),
        ("model: 5", r":1: model: fields with values are expected, found '5'"),
        ("remat: most", "remat='most': one of none, dots, full"),
        ("zero: 1", "--zero 1 beside --mesh.fsdp -1: --mesh.fsdp shards parameters"),
        ("accumulate: 2\nmaster_weights: true", "accumulate is now gradient_accumulation_steps"),
        ("seed: [", "--compare .* is no YAML"),
        (None, r"--compare \S+changes\.yaml: there is no such file"),
    ],
)
def test_compare_refuses_what_is_no_setting_in_its_line(text, told, tmp_path):
    path = tmp_path / "changes.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=told) as wrong:
        apply_changes(GIVEN, path)
    assert "changes.yaml" in str(wrong.value)


def test_two_files_are_compared_of_which_one_is_of_before(beside):
    given = replace(beside(OF_MLPS, "remat: full\nzero: 3", OF_BEFORE), remat="dots")
    with pytest.warns(UserWarning, match="accumulate is gradient_accumulation_steps"):
        first, today, before = alternatives(given)
    assert first == ("remat=dots", given)
    assert today == ("0.yaml", replace(given, remat="full", zero=3))
    changes = {"gradient_accumulation_steps": 2, "master_weights": True, "remat": "full"}
    offload = OffloadOptions(optimizer=True)
    wanted = replace(given, mesh=MeshConfig(fsdp=4), offload=offload, **changes)
    assert before == ("1.yaml", wanted)


OF_BEFORE = """
strategy: fsdp+host_optimizer
mesh: {fsdp: 4}
accumulate: 2
remat: full
optimizer: {master: true}
"""


@pytest.mark.parametrize(
    ("text", "mesh", "others"),
    [
        ("strategy: ddp", {}, {}),
        ("strategy: zero1", {}, {"zero": 1}),
        ("strategy: fsdp", {"fsdp": -1}, {}),
        ("strategy: tensor\nmesh: {tensor: 2}", {"tensor": 2}, {"sequence_parallel": False}),
    ],
)
def test_a_strategy_of_before_says_the_whole_layout(text, mesh, others, tmp_path):
    given = replace(
        GIVEN, mesh=MeshConfig(fsdp=2, context=4), offload=OffloadOptions("0.5", optimizer=True)
    )
    with pytest.warns(UserWarning, match="strategy is mesh"):
        found = changed(given, tmp_path, text)
    offload = OffloadOptions("0.5")  # which --strategy did not say
    assert found == replace(given, mesh=MeshConfig(**mesh), offload=offload, **others)


def test_the_settings_of_a_run_are_those_of_its_configuration():
    config = TrainConfig(mesh=MeshConfig(fsdp=-1), cpu_devices=8, run_dir=Path("runs/a"))
    assert memory_settings(config) == Memory(mesh=MeshConfig(fsdp=-1))


def test_an_alternative_that_cannot_be_is_told_with_its_reason(beside):
    found = report(beside(OF_MLPS, "gradient_accumulation_steps: 3"))
    assert len(found.estimates) == 1
    assert "batch of 16 examples does not divide by 3 microbatches" in found.refused["0.yaml"]


def test_changes_are_in_a_file(tmp_path):
    with pytest.raises(ValueError, match="--compare remat=full: the name of a YAML file is exp"):
        apply_changes(GIVEN, Path("remat=full"))
    assert changed(GIVEN, tmp_path, "remat: full").remat == "full"


def test_files_of_one_name_are_told_apart_and_none_is_no_file(tmp_path):
    paths = tuple(tmp_path / name for name in ("a/full.yaml", "b/full.yaml", "dots.yaml"))
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"remat: {path.stem}")
    found = list(alternatives(replace(GIVEN, compare=paths)))
    assert [name for name, _ in found] == ["remat=none", *map(str, paths[:2]), "dots.yaml"]
    assert [x.remat for _, x in found] == ["none", "full", "full", "dots"]
    assert len(list(alternatives(replace(GIVEN, compare=(Path("none"),))))) == 1


# --- what is shown --------------------------------------------------------------------------------


def test_the_table_tells_numbers_by_where_they_come_from(compared):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table(replace(compared, memory=2**30)))
    text = console.export_text()
    for words in ("from the layout", "from the trace", "from the compiler", "sent in a step"):
        assert words in text
    (line,) = (line for line in text.splitlines() if "kept by layers" in line)
    assert line.split()[3:] == ["16.0", "KiB", *line.split()[5:7], "0", "B"]
    assert "peak of 1.0 GiB" in text


def test_the_picture_is_a_png_also_with_a_part_on_the_host(compared, tmp_path):
    memory_picture.draw(replace(compared, memory=2**20), tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"


def test_a_label_of_the_picture_is_never_on_the_line_of_the_limit():
    limit, top = 800, 1000
    for bar in range(0, top, 10):
        starts = memory_picture._above(bar, limit, top)
        assert starts >= limit or starts + 0.06 * 1.12 * top <= limit
        assert starts == bar or 0 <= limit - bar <= 70
    assert memory_picture._above(500, None, top) == 500


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_all_numbers(tmp_path):
    flags = (
        "--model.num-layers 2 --model.hidden-size 32 --model.num-heads 2 --vocab 64 "
        "--cpu-devices 2 --gpu here"
    )
    full = tmp_path / "full.yaml"
    full.write_text("remat: full")
    words = [*flags.split(), "--compare", str(full), "--json", str(tmp_path / "memory.json")]
    ran = [sys.executable, "-m", "hfjax", "memory", *words, "--plot", str(tmp_path / "memory.png")]
    done = subprocess.run(ran, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "gpt-tiny, DDP on data=2 (2 x CPU), 32 sequences of 64 tokens" in done.stdout
    told = json.loads((tmp_path / "memory.json").read_text())
    assert [e["name"] for e in told["estimates"]] == ["remat=none", "full.yaml"]
    assert (tmp_path / "memory.png").exists()


def test_every_device_that_is_counted_on_is_used_and_told():
    hsdp = replace(OF_MLPS, mesh=MeshConfig(data=2, fsdp=4))
    assert "HSDP on data=2 x fsdp=4 (8 x CPU)" in report(hsdp).title
    layers = lambda given: next(iter(estimates(given).values())).layers
    alone = layers(replace(hsdp, mesh=MeshConfig(data=1, fsdp=4), devices=4))
    assert layers(hsdp) == alone / 2  # half of the rows
    with pytest.raises(ValueError, match=r"4 of the 8 devices are used.* meant: --devices 4\."):
        report(replace(hsdp, mesh=MeshConfig(data=1, fsdp=4)))
    with pytest.raises(ValueError, match=r"4 of the 8 devices are used.* meant: --count 4\."):
        report(replace(hsdp, gpu="h200", mesh=MeshConfig(data=1, fsdp=4)))


def test_a_mistake_ends_the_command_in_words(capsys, monkeypatch):
    monkeypatch.setattr("hfjax.cli.memory.command._configure_jax", lambda given: None)
    flags = "--gpu here --vocab 64 --model.num-layers 2 --global-batch-size 9"
    assert command(flags.split()) == 2
    assert "hfjax memory: batch of 9 examples does not divide" in capsys.readouterr().err


def test_the_picture_has_to_be_a_png():
    with pytest.raises(ValueError, match=r"--plot memory.svg: the picture is a .png file"):
        replace(GIVEN, plot=Path("memory.svg"))


# --- sizes, and the least offload that fits -------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * 2**30), ("80 GB", 80 * 10**9), ("1.5mib", 3 * 2**19), ("512", 512)],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["24 gigs", "much", "-3GiB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=f"--device-memory {text}: a size is expected"):
        replace(GIVEN, device_memory=text)


@pytest.mark.parametrize("wanted", range(17))
def test_bisection_finds_every_ratio_and_builds_each_once(wanted):
    built = []

    def build(ratio):
        built.append(ratio)
        return 1000 - round(16 * ratio)

    found = least_offload(build, memory=1000 - wanted)
    assert found.ratio == wanted / 16
    assert len(built) == len(set(built)) <= 7
    assert found.monotone
    assert wanted == 0 or found.peaks[(wanted - 1) / 16] > found.memory


def test_where_more_offload_takes_more_memory_a_lesser_one_is_found_and_told():
    peaks = [100] * 7 + [50, 100] + [40] * 8  # 7/16 fits, 8/16 does not
    found = least_offload(lambda ratio: peaks[round(16 * ratio)], memory=60)
    assert found.ratio == 7 / 16
    assert not found.monotone


@pytest.mark.parametrize(
    "fields",
    [
        {"steps": 0},
        {"steps": float("nan")},
        {"steps": 1.5},
        {"memory": float("nan")},
        {"memory": -5},
        {"memory": "3"},
    ],
)
def test_an_offload_is_not_looked_for_by_what_is_no_number(fields):
    (name, given), *_ = fields.items()
    with pytest.raises(ValueError, match=f"least_offload: .*{name}={given!r}.* are expected"):
        least_offload(lambda ratio: 100, **({"memory": 60} | fields))


def test_where_nothing_fits_there_is_no_ratio():
    found = least_offload(lambda ratio: 100, memory=60)
    assert (found.ratio, dict(found.peaks)) == (None, {0.0: 100, 1.0: 100})


def test_auto_needs_a_compiler_that_counts_offload():
    with pytest.raises(ValueError, match="the compiler for CPUs counts no offload"):
        report(with_offload(GIVEN, "auto"))


def test_a_ratio_above_one_is_refused():
    with pytest.raises(ValueError, match="a fraction of the bytes from 0 to 1"):
        report(with_offload(GIVEN, "1.5"))


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({}, 0.75),
        ({"XLA_CLIENT_MEM_FRACTION": ".9"}, 0.9),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, 0.5),
        ({"XLA_CLIENT_MEM_FRACTION": "0.9", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, 1.0),
    ],
)
def test_a_peak_is_compared_with_what_jax_takes_of_a_gpu(monkeypatch, given, part):
    monkeypatch.setattr(memory_command, "can_compile_for_gpus", lambda: False)
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    for name in (*names, "XLA_PYTHON_CLIENT_ALLOCATOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = report(replace(OF_MLPS, gpu="h200"))
    assert found.memory == int(part * GPUS["h200"].memory)
    (note,) = (
        (note for note in found.notes if "XLA_CLIENT_MEM_FRACTION" in note) if part < 1 else [""]
    )
    assert part == 1 or f"JAX takes {part:.0%} of the 141.0 GiB of a H200" in note
    said = report(replace(OF_MLPS, gpu="h200", device_memory="24GiB"))
    assert said.memory == 24 * 2**30
    assert not any("XLA_CLIENT_MEM_FRACTION" in note for note in said.notes)


@pytest.mark.parametrize("given", ["much", "0", "-1", "nan"])
def test_a_fraction_that_is_none_is_refused(monkeypatch, given):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", given)
    wanted = (
        f"XLA_CLIENT_MEM_FRACTION={given}: a part of the memory of a GPU is expected, as in 0.9"
    )
    with pytest.raises(ValueError, match=wanted):
        report(replace(OF_MLPS, gpu="h200"))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    with pytest.raises(
        ValueError, match="XLA_PYTHON_CLIENT_MEM_FRACTION are both set: JAX refuses"
    ):
        report(replace(OF_MLPS, gpu="h200"))


@pytest.mark.skipif(can_compile_for_gpus(), reason="the wheels are here")
def test_without_the_wheels_the_report_says_whose_numbers_these_are():
    found = report(replace(OF_MLPS, gpu="h200"))
    (note,) = (note for note in found.notes if "those of a program compiled for CPUs" in note)
    assert "pip install --no-deps --target" in note
    assert found.device == "NVIDIA H200"


def test_without_the_wheels_the_command_says_so_before_it_compiles(monkeypatch, capsys):
    def compiles(*given):
        raise ValueError("now it compiles")

    monkeypatch.setattr(memory_command, "_configure_jax", lambda given: None)
    monkeypatch.setattr(memory_command, "can_compile_for_gpus", lambda: False)
    monkeypatch.setattr(memory_command, "report", compiles)
    assert command(["--gpu", "h200"]) != 0
    first, _, then = capsys.readouterr().err.partition("now it compiles")
    assert re.search(
        r"is compiled for the CPU.* not of a H200\..* pip install --no-deps --target", first
    )
    assert not then.strip()
    command(["--gpu", "here"])
    assert "is compiled for the CPU" not in capsys.readouterr().err


@pytest.mark.cuda
def test_for_an_h200_the_least_offload_that_fits_is_found_by_compiling(beside):
    h200s(1)
    model = ModelConfig(preset="gpt-tiny", seq_len=128, num_layers=4, num_heads=2, hidden_size=128)
    given = replace(GIVEN, model=model, gpu="h200", count=1, global_batch_size=32)
    none, whole = report(beside(given, "offload: {activations: 1}")).estimates
    assert whole.peak < none.peak
    assert whole.host_compiled == whole.host_stashes == whole.to_host == whole.to_device
    half = (none.peak + whole.peak) // 2
    found = report(replace(with_offload(given, "auto"), device_memory=str(half)))
    assert found.estimates[0].peak <= half < none.peak
    assert "is the least that fits" in found.notes[0]
    missed = report(replace(with_offload(given, "auto"), device_memory="1MiB")).missed
    assert missed is not None
    assert "even with all that layers keep on the host" in missed


# --- the benchmark --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_benchmark_of_offload_runs_and_judges_its_goals(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    offload = importlib.import_module("benchmarks.offload")
    cases = {name: offload.CASES[name] for name in ("remat full", "offload 1")}
    monkeypatch.setattr(offload, "CASES", cases)
    text = offload.smoke()
    assert [line.split(" | ")[0] for line in text.splitlines()[2:4]] == [f"| {n}" for n in cases]
    assert "x remat full (goal 1.05 x)" in text
    assert "GB/s there and back over a step (goal 45)" in text
