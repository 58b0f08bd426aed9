"""`make gpu` without a GPU: its sections run, fail alone, and what they found is written."""

import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from benchmarks import gpu
from benchmarks.gpu_sections import device, record, report, train_images, training, vision
from benchmarks.gpu_sections.cases import Case, measured, run_cases, tunings
from benchmarks.gpu_sections.rows import Reporter, ratio, row_in
from hfjax.models.vision import convolutions
from hfjax.parallel.execution import Execution
from hfjax.weights.vision_rules import model_factory
from tests.kernels import lowered

ROOT = Path(__file__).parents[1]
QUICK = ["ceilings", "cross_entropy"]
KERNELS = ["attention", "loss", "products"]  # sections that measure them


def rows_of(capsys):
    return [row for line in capsys.readouterr().out.splitlines() if (row := row_in(line))]


def case(**changes):
    """A kernel that doubles, beside a rival that adds."""
    given = {
        "kernel": "cross_entropy",
        "name": "small",
        "operands": lambda seed: (jnp.arange(8.0) + seed,),
        "candidates": {"default": lambda x: 2 * x},
        "rivals": {"XLA": lambda x: x + x},
        "oracle": lambda x: 2 * x,
        "flops": 8.0,
        "bytes": 64.0,
    }
    return Case(**(given | changes))


def smoke(out, *more):
    command = [sys.executable, "-m", "benchmarks.gpu", "--smoke", "--out", str(out), *more]
    settings = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return json.loads((out / "gpu.json").read_text()), (out / "gpu.md").read_text()


def assert_complete(found, page, names):
    assert [(s["name"], s["ended"]) for s in found["sections"]] == [(n, "ok") for n in names]
    for row in found["rows"]:
        able = ("ok", "not there") if row.get("kernel") in report.TRAINED else ("ok",)  # no torch
        assert row["status"] in able, row
        assert row.get("kernel", "") in page
    assert found["versions"]["jax"] == jax.__version__
    assert "--smoke" in found["command"]


# -- the whole command --------------------------------------------------------------------


@pytest.mark.slow
def test_a_dry_run_on_a_cpu_writes_what_its_sections_found(tmp_path):
    found, page = smoke(tmp_path, "--only", *QUICK)
    assert_complete(found, page, QUICK)
    kernels = {row["kernel"] for row in found["rows"]}
    assert {"device", "copy", "product", "launch", "cross_entropy"} <= kernels
    more, _ = smoke(tmp_path, "--only", *QUICK, "--more")
    assert more["rows"] == found["rows"]


@pytest.mark.slow
def test_all_sections_run_dry_on_a_cpu(tmp_path):
    found, page = smoke(tmp_path)
    assert_complete(found, page, list(gpu.SECTIONS))


@pytest.mark.skipif(device.is_there(), reason="a GPU is here")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "no GPU is here" in done.stderr
    assert "--smoke" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_time_is_thought_of_for_each_section_and_each_has_a_limit():
    for name, section in gpu.SECTIONS.items():
        assert 0 < section.thought < section.limit < gpu.SECONDS, name
        assert callable(section.function())


def test_what_does_not_fit_into_the_time_is_told(tmp_path):
    given = gpu.arguments(["--seconds", "1", "--out", str(tmp_path), "--only", "ceilings"])
    found = gpu.Found(tmp_path, {"command": "gpu", "date": "today", "versions": {}})
    gpu.run_all(given, found)
    assert found.sections[0]["ended"] == "no time left: not run"


# -- one section --------------------------------------------------------------------------

PRINTS = """
import sys, time
from benchmarks.gpu_sections.rows import Reporter
Reporter("one", 5).row(kernel="first", status="ok")
print("what a library says")
"""


@pytest.mark.parametrize(
    ("then", "ended"),
    [
        ("", "ok"),
        ("raise RuntimeError('out of memory')", "ended with 1: .*out of memory"),
        ("import os; os.abort()", "ended with -6"),
        ("time.sleep(60)", "cut off after 2 s"),
    ],
)
def test_a_section_that_fails_or_hangs_keeps_its_rows_and_says_how_it_ended(
    then, ended, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    rows, start = [], time.monotonic()
    command = [sys.executable, "-c", f"{PRINTS}\nsys.stdout.flush()\n{then}"]
    told = gpu.run_section(command, 2 if "sleep" in then else 20, rows.append)
    assert rows == [{"section": "one", "kernel": "first", "status": "ok"}]
    assert time.monotonic() - start < 30
    assert re.match(ended, told), told


# -- a kernel's case ----------------------------------------------------------------------


def test_a_right_kernel_has_a_time_a_ratio_and_an_error():
    row = measured(case(), smoke=True)
    assert row["status"] == "ok"
    assert row["error"] == 0
    assert ratio(row) == row["rival_ms"] / row["ms"]
    assert row["candidates"].keys() == {"default"}


def test_a_wrong_kernel_is_told_and_wins_nothing():
    wrong = case(candidates={"default": lambda x: 2 * x + 1, "other": lambda x: x * jnp.nan})
    row = measured(wrong, smoke=True)
    assert row["status"] == "WRONG"
    assert ratio(row) is None
    assert "ms" not in row
    assert row["candidates"]["other"].startswith("wrong: 1")
    assert "**WRONG**" in "\n".join(report._kernels([row], report._Rates((0, 0), {})))
    assert record.recorded([row], "0") == {}


def test_a_candidate_that_is_wrong_or_fails_leaves_the_others():
    def fails(x):
        raise ValueError("too much shared memory")

    row = measured(case(candidates={"a": lambda x: x, "b": fails, "c": lambda x: 2 * x}), True)
    assert row["status"] == "ok"
    assert row["tuning"] == "c"
    assert row["candidates"]["a"].startswith("wrong")
    assert "too much shared memory" in row["candidates"]["b"]


def test_operands_that_are_kept_are_updated_in_place():
    row = measured(case(kept=1, operands=lambda seed: (jnp.ones(8),)), smoke=True)
    assert row["status"] == "ok"


def test_a_case_that_fails_is_a_row_and_the_others_go_on(capsys):
    cases = [case(operands=lambda seed: 1 / 0), case()]
    run_cases(Reporter("one", 60, smoke=True), lambda smoke: cases)
    statuses = [row["status"] for row in rows_of(capsys)]
    assert statuses == ["failed: ZeroDivisionError: division by zero", "ok"]


@pytest.mark.parametrize("module", KERNELS)
def test_every_case_of_a_kernel_has_its_tunings(module):
    for one in import_module(f"benchmarks.gpu_sections.{module}").cases(smoke=False):
        assert one.candidates, one.name
        assert "reference" not in one.candidates


@pytest.mark.slow
@pytest.mark.parametrize("module", KERNELS)
def test_every_candidate_of_a_kernel_lowers_for_cuda(module):
    found = import_module(f"benchmarks.gpu_sections.{module}")
    for one in found.cases(smoke=False):
        shapes = jax.eval_shape(partial(one.operands, 0))
        for name, function in one.candidates.items():
            print(one.kernel, one.name, name)
            lowered(function, *shapes)


# -- what is made of it -------------------------------------------------------------------


def measured_row(**changes):
    row = {"section": "s", "kernel": "cross_entropy", "case": "one", "status": "ok", "ms": 2.0}
    row["default_ms"] = 2.0
    return row | {"rival": "optax", "rival_ms": 3.0, "flops": 0, "bytes": 3e9} | changes


def test_what_is_recorded_of_each_shape_is_the_worst_ratio_of_kernels_that_were_right():
    small, large = {"shape": {"N": 8}}, {"shape": {"N": 64}, "case": "three"}
    rows = [measured_row(**small), measured_row(case="two", rival_ms=1.0, **small)]
    (found,) = record.recorded(rows, "0.11.2")["cross_entropy"]
    assert (found["shape"], found["ratio"]) == ({"N": 8}, 0.5)
    assert (found["rival"], found["jax"]) == ("optax", "0.11.2")
    assert found["cases"] == {"one": 1.5, "two": 0.5}
    ratios = lambda *more: [
        one["ratio"] for one in record.recorded([*rows, *more], "0.11.2").get("cross_entropy", [])
    ]
    assert ratios(measured_row(**large)) == [0.5, 1.5]
    assert ratios(measured_row(status="failed: too much memory", **large)) == [0.5, 0]
    assert ratios(measured_row(default_ms=None, **large)) == [0.5, 0]
    assert ratios(measured_row(rival_ms=None, **large)) == [0.5]  # the rival failed
    assert ratios(measured_row(status="WRONG", rival_ms=None, **large)) == []
    assert ratios(measured_row(candidates={"default": "wrong: 1.0e+00"}, **large)) == []


def test_what_is_recorded_counts_with_the_tuning_that_users_get():
    tuned = record.recorded([measured_row(default_ms=4.0, tuning="rows=2")], "0.11.2")
    assert tuned["cross_entropy"][0]["ratio"] == 0.75
    assert tuned["cross_entropy"][0]["best"] == {"tuning": "rows=2", "ratio": 1.5}


def test_the_record_replaces_what_was_measured_again(tmp_path, monkeypatch):
    table = tmp_path / "kernels" / "measured.json"
    table.parent.mkdir()
    old = {"cross_entropy": [{"ratio": 9}], "flash_block": [{"ratio": 2}]}
    table.write_text(json.dumps({"NVIDIA H100": old, "NVIDIA H200": {"x": {}}}))
    monkeypatch.setattr(record, "MEASURED", table)
    record.write("NVIDIA H100 80GB HBM3", [measured_row()], "0.11.2", tmp_path)
    written = json.loads((tmp_path / "measured.json").read_text())
    assert written == json.loads(table.read_text())
    assert [one["ratio"] for one in written["NVIDIA H100"]["cross_entropy"]] == [1.5]
    assert written["NVIDIA H100"]["flash_block"] == [{"ratio": 2}]
    assert written["NVIDIA H200"] == {"x": {}}


def test_the_page_tells_goals_that_are_reached_and_missed():
    goals = [{"what": "of_ceiling", "bound": 0.85}, {"what": "ratio", "bound": 2.0}]
    row = measured_row(goals=goals)
    assert report.goals(row, (1e15, 1.5e12)) == [
        "of ceiling 0.85: reached",
        "ratio 2: **missed**",
    ]


def test_every_program_of_the_training_is_one_that_hfjax_knows():
    images = [setting for group in vision.IMAGES.values() for setting in group]
    for setting in [*training.SETTINGS.values(), *images]:
        for name in training.able(setting):
            asked = setting.asked(name, tiny=True)
            if asked.program == "hfjax":
                own = {name: x for name, x in asked.execution.items() if name != "gathered"}
                Execution(**own)
        left_out = set(setting.programs) - set(training.able(setting))
        assert all(name.startswith(training.TORCH) for name in left_out)


def test_operations_of_a_step_are_those_of_the_parameters_and_of_attention():
    setting = training.SETTINGS["small 16"]
    per_token = 6 * (124_475_904 - 1024 * 768) + 12 * 12 * 768 * 1024
    assert setting.flops(124_475_904) == 16 * 1024 * per_token


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, marks=() if setting.preset == "resnet50" else pytest.mark.slow)
        for group in vision.IMAGES.values()
        for setting in group
    ],
    ids=lambda setting: setting.preset,
)
def test_operations_on_images_are_the_products_of_convolutions(setting, monkeypatch):
    config = train_images.shape_of(setting.asked("hfjax", tiny=False))
    found, convolve = [], convolutions.convolve

    def counting(x, kernel, *given):
        y = convolve(x, kernel, *given)
        found.append(y[0].size * math.prod(kernel.shape[:3]))
        return y

    monkeypatch.setattr(convolutions, "convolve", counting)
    image = jax.ShapeDtypeStruct((2, setting.length, setting.length, 3), jnp.float32)
    with jax.numpy_rank_promotion("allow"):
        jax.eval_shape(lambda image: model_factory(config)(nnx.Rngs(0))({"image": image}), image)
    assert sum(found) == setting.products
    flops = setting.numbers(1e3, setting.asked("hfjax", tiny=False), {})["flops"]
    assert flops == 6 * setting.rows * setting.products


def trained_images(**changes):
    name = vision.IMAGES["main"][0].name
    row = {"section": "vision", "kernel": name, "case": "hfjax", "status": "ok", "ms": 50.0}
    row |= {"images_s": 2560.0, "flops": 3.1e12, "memory": 2**33, "compiled": 2**32}
    return row | {"losses": [6.9], "ready_s": 30.0} | changes


def test_the_page_compares_training_on_images_with_torch():
    slow = trained_images(case="torch.compile", ms=100.0, images_s=1280.0, compiled=None)
    failed = trained_images(case="hfjax, remat full", status="failed: no time left")
    rows = [{"kernel": "device", "kind": "NVIDIA H100"}, trained_images(), slow, failed]
    found = {"command": "gpu", "date": "today", "versions": {}, "sections": [], "rows": rows}
    page = report.page(found)
    numbers = "hfjax | 50.0 ms | 2,560 | 2.00 | 6.3% | 8.00 GiB | 30 s | 62 | 4.00 GiB |"
    assert f"{rows[1]['kernel']} | {numbers}" in page.partition("## Training on images")[2]
    assert "| **failed: no time left** |" in page
    assert "not the same training" not in page
    rows[2]["losses"] = [7.9]
    assert "**not the same training**: torch.compile: first losses [7.9]" in report.page(found)


@dataclass(frozen=True)
class Tuning:
    rows: int = 1

    def __post_init__(self):
        if self.rows > 4:
            raise ValueError("too many rows")


def test_tunings_that_a_kernel_refuses_are_left_out_and_unknown_ones_are_mistakes():
    found = tunings(Tuning(), {"rows": 2}, {"rows": 8}, {"rows": 1})
    assert found == {"default": Tuning(), "rows=2": Tuning(2)}
    with pytest.raises(TypeError, match="stages"):
        tunings(Tuning(), {"stages": 2})
