"""Programs of candidates: at two depths as good as whole, each in a process, kept on disk."""

import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, replace

import pytest

from hfjax.planner.programs import compile_candidates as planner
from hfjax.planner.programs.compile_candidates import CompileFailure, compile_candidate
from hfjax.planner.programs.compile_step import (
    DEPTHS,
    CompiledTransfer,
    ProgramStats,
    compile_program,
    compile_two_depths,
    extrapolate_depth,
    layers_without_loop,
)
from hfjax.planner.programs.live_bytes import live_bytes
from hfjax.planner.programs.placeholder_attention import fused_attention
from hfjax.planner.programs.planned_run import PlannedRun
from hfjax.trainer.config import MeshConfig, ModelConfig, TrainConfig
from tests.h200 import h200s

TINY = TrainConfig(
    model=ModelConfig(preset="gpt-tiny"),
    global_batch_size=8,
    precision="bf16",
    mesh=MeshConfig(fsdp=-1),
)
ROW = CompiledTransfer("all-gather", "fsdp", 1024, 4, 1e-6, 5e-7, 1e9, False)
FOUND = ProgramStats(100, 40, 60, 0, (ROW,), 3.5)


def child(monkeypatch, code):
    """Let this code stand for the process that compiles."""
    monkeypatch.setattr(planner, "COMMAND", (sys.executable, "-c", code))
    monkeypatch.setattr(planner, "can_compile_for_gpus", lambda: True)


def telling(found=FOUND):
    """Return code that tells a result."""
    return f"import sys; sys.stdin.readline(); print({json.dumps(asdict(found))!r})"


def sent(found, of=lambda t: t.bytes):
    """Return payload bytes by kind of collective and axes."""
    totals = Counter()
    for t in found.transfers:
        totals[t.kind, t.axes] += of(t) * t.count
    return totals


def calls(found):
    """Return how many collectives run, by kind and axes."""
    return sent(found, lambda t: 1)


NEVER = "raise SystemExit('nothing was to be compiled')"


# --- two depths -----------------------------------------------------------------------------------


def test_what_layers_add_is_the_difference_of_two_depths():
    few = replace(FOUND, transfers=(ROW, replace(ROW, kind="all-reduce", bytes=60, count=1)))
    more = ProgramStats(
        160, 70, 90, 0,
        (replace(ROW, count=10), replace(ROW, kind="all-reduce", bytes=120, count=1)),
    )  # fmt: skip
    found = extrapolate_depth(24, few, more)
    assert (found.peak, found.arguments) == (280, 130)
    assert sent(found) == {("all-gather", "fsdp"): 22 * 1024, ("all-reduce", "fsdp"): 240}
    assert calls(found) == {("all-gather", "fsdp"): 22, ("all-reduce", "fsdp"): 1}
    exposed = sum((t.seconds - t.covered) * t.count for t in found.transfers)
    assert exposed == pytest.approx(23 * 5e-7)


def test_calls_that_are_joined_otherwise_at_two_depths_are_told_by_their_mean():
    some = lambda *sizes: replace(FOUND, transfers=tuple(replace(ROW, bytes=b) for b in sizes))
    found = extrapolate_depth(24, some(100, 300), some(100, 200, 400))
    assert sent(found) == {("all-gather", "fsdp"): 4 * (700 + 2 * 300)}
    assert calls(found) == {("all-gather", "fsdp"): 4 * 5}
    fewer = extrapolate_depth(24, some(100, 300), replace(FOUND, transfers=()))
    assert fewer.transfers == ()


PROGRAM = """HloModule jit_step, is_scheduled=true

ENTRY %main (p: f32[100]) -> f32[100] {
  %p = f32[100]{0} parameter(0)
  %kept = bf16[1000]{0} fusion(%p), kind=kLoop, calls=%a, metadata={op_name="jvp()/mul"}
  %start = (bf16[8]{0}, bf16[64]{0}) all-gather-start(%kept), dimensions={0}
  %done = bf16[64]{0} all-gather-done(%start)
  %both = (f32[50]{0}, f32[70]{0}) fusion(%kept, %done), calls=%b, metadata={op_name="transpose(x)"}
  %one = f32[50]{0} get-tuple-element(%both), index=0
  %two = f32[70]{0} get-tuple-element(%both), index=1
  %view = f32[5,10]{1,0} bitcast(%one)
  %sum = f32[10]{0} fusion(%view, %two), calls=%c, metadata={op_name="transpose(y)"}
  ROOT %new = f32[100]{0} fusion(%p, %sum), kind=kLoop, calls=%d
}
"""


def test_what_is_live_is_told_before_and_after_half_of_the_backward_pass():
    before = 2000 + 128 + 4 * (50 + 70)  # %kept, what was gathered, %both
    begun = PROGRAM.replace("transpose(x)", "jvp(x)")
    assert live_bytes(begun) == (before, 4 * (50 + 70 + 10))
    assert live_bytes(PROGRAM) == live_bytes(begun)
    assert live_bytes(begun.replace("transpose(y)", "jvp(y)")) == (before, 0)


CASES = {
    "gpt-medium, fsdp": (ModelConfig(preset="gpt-medium"), 24, 50257, {"global_batch_size": 128}),
    # at two depths an update takes most memory, in the whole program the backward pass
    "llama3-8b, fsdp, dots": (
        ModelConfig(preset="llama3-8b", seq_len=4096),
        32,
        128256,
        {"global_batch_size": 8, "remat": "dots"},
    ),
    "llama3-8b, fsdp, full": (
        ModelConfig(preset="llama3-8b", seq_len=4096),
        32,
        128256,
        {"global_batch_size": 8, "remat": "full"},
    ),
    "gpt-medium, ddp": (
        ModelConfig(preset="gpt-medium"),
        24,
        50257,
        {"global_batch_size": 64, "mesh": MeshConfig()},
    ),
}
SLOW = ("llama3-8b, fsdp, full", "gpt-medium, ddp")


def errors(found, whole):
    """Return by which part a program of two depths differs from the whole one."""
    assert sent(found).keys() == sent(whole).keys()
    part = lambda a, b: abs(a / b - 1)
    return {
        "peak": part(found.peak, whole.peak),
        "arguments": part(found.arguments, whole.arguments),
        **{f"sent {key}": part(sent(found)[key], b) for key, b in sent(whole).items()},
        **{f"calls {key}": part(calls(found)[key], n) for key, n in calls(whole).items()},
    }


@pytest.mark.cuda
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES]
)
def test_two_depths_tell_what_the_whole_program_tells(name, tmp_path):
    devices, (model, layers, vocab, more) = h200s(), CASES[name]
    config = TrainConfig(model=model, precision="bf16", **{"mesh": MeshConfig(fsdp=-1), **more})
    kernels = tmp_path / "kernels"
    kernels.touch()
    at = lambda layers: PlannedRun(
        replace(config, model=replace(model, num_layers=layers)),
        devices,
        vocab,
        attention=fused_attention,
    )
    assert layers_without_loop(at(layers)) == layers
    found, (whole, _) = (
        compile_two_depths(at, layers, kernels),
        compile_program(at(layers), kernels),
    )
    assert (found.depths, whole.depths) == (DEPTHS, ())
    wrong = errors(found, whole)
    assert wrong.pop("peak") <= 0.05
    assert {name: x for name, x in wrong.items() if x > 0.02} == {}


@pytest.mark.cuda
def test_layers_in_a_loop_are_compiled_whole(tmp_path, monkeypatch):
    h200s()
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    model = ModelConfig(preset="gpt-tiny", num_layers=24)
    mesh = MeshConfig(fsdp=-1, tensor=2)
    config = replace(TINY, model=model, mesh=mesh, sequence_parallel=False, remat="full")
    found = compile_candidate(config, vocab=256, limit=300.0, cache=tmp_path)
    assert isinstance(found, ProgramStats), found
    assert not found.depths
    assert found.peak > found.arguments > 0
    assert ("all-gather", "fsdp") in sent(found)


# --- a process of its own -------------------------------------------------------------------------


def test_a_candidate_whose_compilation_dies_is_named_with_the_reason(monkeypatch, tmp_path):
    child(monkeypatch, "raise MemoryError('no more of it')")
    died = CompileFailure("died: MemoryError: no more of it")
    assert compile_candidate(TINY, vocab=256, cache=tmp_path) == died
    child(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    assert compile_candidate(TINY, vocab=256, cache=tmp_path) == CompileFailure("died: SIGKILL")
    child(monkeypatch, "print('no result')")
    assert compile_candidate(TINY, vocab=256, cache=tmp_path) == CompileFailure(
        "died: it told 'no result'"
    )


@pytest.mark.slow
def test_settings_that_cannot_be_are_said_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(planner, "can_compile_for_gpus", lambda: True)
    wrong = replace(TINY, mesh=MeshConfig(fsdp=-1, tensor=3))
    found = compile_candidate(wrong, vocab=256, cache=tmp_path, limit=120.0)
    assert isinstance(found, CompileFailure)
    assert found.why.startswith("died: ValueError: ")


def test_a_candidate_over_its_limit_is_ended_with_all_that_it_started(monkeypatch, tmp_path):
    started = tmp_path / "started"
    code = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(started)!r}, 'w').write(str(p.pid)); time.sleep(600)"
    )
    child(monkeypatch, code)
    found = compile_candidate(TINY, vocab=256, limit=3, cache=tmp_path / "cache")
    assert found == CompileFailure("took more than 3 s")
    assert not _runs(int(started.read_text()))
    assert sorted(p.name for p in (tmp_path / "cache" / "plans").iterdir()) == []


def _runs(pid):
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return False
        except FileNotFoundError:
            return False
        time.sleep(0.05)
    return True


def test_ctrl_c_ends_the_process(monkeypatch, tmp_path):
    child(monkeypatch, "import time; time.sleep(600)")
    kept = []

    def interrupted(process, *rest):
        kept.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(planner, "_send_and_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_candidate(TINY, vocab=256, cache=tmp_path)
    assert kept[0].returncode == -9


def test_the_limit_of_a_pipeline_is_longer(monkeypatch, tmp_path):
    child(monkeypatch, telling())
    limits = []
    monkeypatch.setattr(
        planner, "_run_compile_process", lambda asked, limit: limits.append(limit) or ""
    )
    for config in (TINY, *(replace(TINY, mesh=MeshConfig(pipe=n)) for n in (2, -1))):
        compile_candidate(config, vocab=256, cache=tmp_path)
    assert limits == [60, 240, 240]


def test_without_the_wheels_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(planner, "can_compile_for_gpus", lambda: False)
    with pytest.raises(ValueError, match=r"compiling for a h200 needs the wheels.*pip install"):
        compile_candidate(TINY, vocab=256, cache=tmp_path)


# --- what is kept ---------------------------------------------------------------------------------


def test_what_was_compiled_once_is_read_from_disk(monkeypatch, tmp_path):
    child(monkeypatch, telling())
    assert compile_candidate(TINY, vocab=256, cache=tmp_path) == FOUND
    child(monkeypatch, NEVER)
    assert compile_candidate(TINY, vocab=256, cache=tmp_path) == FOUND
    elsewhere = replace(TINY, steps=7, seed=1, compilation_cache=tmp_path, run_dir=tmp_path)
    assert compile_candidate(elsewhere, vocab=256, cache=tmp_path) == FOUND
    for config, others in (
        (replace(TINY, global_batch_size=16), {}),
        (TINY, {"vocab": 257}),
        (TINY, {"gpu": "h100"}),
        (TINY, {"count": 4}),
    ):
        found = compile_candidate(config, **{"vocab": 256, "cache": tmp_path, **others})
        assert found == CompileFailure("died: nothing was to be compiled")
    monkeypatch.setattr(planner, "_versions", lambda: {"jax": "another"})
    assert isinstance(compile_candidate(TINY, vocab=256, cache=tmp_path), CompileFailure)


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"peak": "large", "transfers": []}'])
def test_a_damaged_file_is_ignored_and_written_again(monkeypatch, tmp_path, damage):
    child(monkeypatch, telling())
    compile_candidate(TINY, vocab=256, cache=tmp_path)
    (file,) = (tmp_path / "plans").glob("*.json")
    whole = file.read_text()
    file.write_text(damage)
    assert compile_candidate(TINY, vocab=256, cache=tmp_path) == FOUND
    assert file.read_text() == whole
    assert [p.name for p in (tmp_path / "plans").iterdir()] == [file.name]


def test_what_data_or_ones_own_code_says_is_not_kept(monkeypatch, tmp_path):
    child(monkeypatch, telling())
    own = replace(TINY, model=ModelConfig(factory="mine.py:model"))
    for config, vocab in ((TINY, None), (own, 256)):
        assert compile_candidate(config, vocab=vocab, cache=tmp_path) == FOUND
    assert list((tmp_path / "plans").glob("*.json")) == []


def test_a_folder_that_cannot_be_written_is_done_without(monkeypatch, tmp_path):
    child(monkeypatch, telling())
    file = tmp_path / "file"
    file.write_text("no folder")
    assert compile_candidate(TINY, vocab=256, cache=file) == FOUND
    assert os.listdir(tmp_path) == ["file"]
