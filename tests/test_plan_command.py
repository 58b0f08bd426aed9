"""`hfjax plan`: the table, --why, what is written, and what is refused in which words."""

import io
import json
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import jax
import pytest
from rich.console import Console

import hfjax
from hfjax.__main__ import main as hfjax_command
from hfjax.cli.draw_timeline import svg
from hfjax.cli.plan import command as plan_command, hardware
from hfjax.cli.plan.command import PlanReport, as_json, as_yaml, build_plan, main as command
from hfjax.cli.plan.compare import find_answer, parse_query
from hfjax.cli.plan.compare_table import transfer_totals, why_report
from hfjax.cli.plan.hardware import Constants, constants_of
from hfjax.cli.plan.settings import PlanSettings, plan_settings, step_batch_size
from hfjax.cli.plan.table import ByteScale, heading, notes_of, plan_table, write
from hfjax.cli.plan.timeline import timeline
from hfjax.hardware.machine import MACHINES, Calibration, Machine
from hfjax.planner.calibration.calibrate import calibrate
from hfjax.planner.make_plan import PlanEntry
from hfjax.planner.score import ScoredCandidate
from hfjax.trainer import config_io
from hfjax.trainer.config import Model, Train
from tests.small_run import BIGRAMS

LENGTH = 16
MODEL = Model(preset="gpt-tiny", length=LENGTH, layers=4, heads=2, embed=32)
GIVEN = PlanSettings(model=MODEL, batch=128, vocab=64, count=8, compile=0, precision="bf16")
SMALL = "--model.length 16 --model.layers 4 --model.heads 2 --model.embed 32".split()
FEW = [*SMALL, "--vocab", "64", "--compile", "0"]  # of the command line


@pytest.fixture(scope="module")
def made() -> PlanReport:
    return build_plan(GIVEN, Train(), constants_of("h200"))


def shown_at(width: int, group) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=True, color_system=None).print(group)
    return file.getvalue().splitlines()


def table_of(made: PlanReport):
    notes = [*notes_of(made.plan, made.settings), *made.notes]
    return plan_table(made.plan, made.settings.rows, list(heading(made.plan, made)), notes)


def asked(made: PlanReport, why: str) -> PlanReport:
    words = parse_query(why, made.plan.count)
    found = find_answer(made.plan, words, lambda words: None)
    given = replace(made.settings, why=why)
    return replace(made, settings=given, query=tuple(words.items()), answer=found)


def row_of(made: PlanReport, why: str) -> PlanEntry:
    found = asked(made, why).answer
    assert found is not None
    row = plan_command._answer_entry(found, made.plan)
    assert row is not None
    return row


def answered(made: PlanReport, why: str) -> str:
    found = asked(made, why)
    assert found.answer is not None
    lines = shown_at(160, why_report(made.plan, found.answer, why, dict(found.query)))
    return "\n".join(line.rstrip() for line in lines)


def error_of(capsys, *words: str) -> str:
    """Return what the command tells that refuses its arguments."""
    try:
        status = command(list(words))
    except SystemExit as end:
        status = end.code
    told = capsys.readouterr()
    assert status == 2, told
    return " ".join(re.sub("[│╭╮╰╯─]", " ", told.err).split())


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_rows_are_ranked_and_their_parts_add_up(made):
    times = [row.time.total for row in made.plan.entries]
    assert times == sorted(times)
    assert len(times) >= made.settings.rows
    for row in made.plan.entries:
        assert row.time.total == pytest.approx(sum(row.time.parts.values()))
        assert row.fits
        assert row.reason or row is made.plan.best


def test_a_terminal_of_80_columns_shows_every_number(made):
    lines = shown_at(80, table_of(made))
    assert max(map(len, lines)) <= 80
    head = " ".join(line.strip() for line in lines[:5])
    for words in ("gpt-tiny on 8 x NVIDIA H200", "2,048 tokens in a step (128 rows of 16 tokens)"):
        assert words in head
    assert "a step may use 105.8 GiB of a device's 141.0 GiB" in head
    assert re.search(r"[\d,]+ ways searched in \d+ s.*; predicted by formulas", head)
    number = next(n for n, line in enumerate(lines) if line.startswith(" 1  "))
    row = made.plan.best
    assert lines[number].strip().endswith(str(row.candidate))
    found = lines[number + 1].split()
    assert len(found) == 10
    assert found[6:8] == [f"{row.tokens:,.0f}", f"{row.mfu:.1%}"]
    assert not any(line.rstrip().endswith("…") for line in lines)  # nothing is cut off


def test_what_is_piped_has_two_lines_for_each_row(made):
    file = io.StringIO()
    write(Console(file=file), table_of(made))
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    rows = made.plan.entries[: made.settings.rows]
    first = next(n for n, line in enumerate(lines) if line.startswith(" 1  "))
    for n, row in enumerate(rows):
        how, numbers = lines[first + 2 * n : first + 2 * n + 2]
        why = f" ({row.reason})" if row.reason else ""
        assert how == f"{n + 1:>2}  {row.candidate}{why}"
        assert f"{row.tokens:,.0f}" in numbers


def test_what_does_not_fit_is_below_the_table(made):
    small = replace(made.plan.best, fits=False, reason="9 GiB: activations")
    faster = replace(small, time=replace(small.time, products=0.0))
    other = replace(made, plan=replace(made.plan, others=(faster,)))
    lines = shown_at(200, table_of(other))
    below = lines[lines.index("would be faster, but does not fit:") :]
    assert any("9 GiB: activations" in line for line in below)


def test_the_vocabulary_and_float32_are_told_where_nobody_said_them(made):
    plan = made.plan
    notes = list(notes_of(plan, replace(GIVEN, vocab=None)))
    assert any("vocabulary is that of the data" in note for note in notes)
    assert not any("vocabulary" in note for note in notes_of(plan, GIVEN))
    assert not any("float32" in note for note in notes_of(plan, GIVEN))


# --- what is written ------------------------------------------------------------------------------


def test_the_file_has_what_differs_and_train_reads_it(made, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(as_yaml(made.plan, made.plan.best))
    assert config_io.load(path) == config_io.with_absolute_paths(made.plan.settings())
    assert "seed" not in path.read_text()
    assert "optimizer" not in path.read_text()


def test_the_json_has_every_row_with_its_parts(made):
    found = json.loads(json.dumps(as_json(asked(made, "tensor=2"))))
    assert len(found["rows"]) == len(made.plan.entries)
    first = found["rows"][0]
    assert first["seconds"]["total"] == pytest.approx(made.plan.best.time.total)
    assert first["settings"]["batch"] == 128
    assert found["why"]["words"] == {"tensor": 2}
    assert found["why"]["row"]["bytes"]["total"] > 0


def test_the_command_writes_all_files(tmp_path, monkeypatch, capsys, made):
    monkeypatch.setattr(plan_command, "build_plan", lambda *_: replace(made, settings=given))
    paths = {name: tmp_path / f"plan{end}" for name, end in ENDINGS.items()}
    given = replace(GIVEN, **paths)
    words = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    assert hfjax_command(["plan", *FEW, "--batch", "16", *words]) == 0
    assert all(path.exists() for path in paths.values())
    assert "hfjax train --config" in capsys.readouterr().out


ENDINGS = {"out": ".yaml", "json": ".json", "picture": ".svg"}


def test_without_a_file_the_command_says_how_to_write_one(monkeypatch, capsys, made):
    monkeypatch.setattr(plan_command, "build_plan", lambda *_: made)
    assert command([*FEW, "--batch", "16"]) == 0
    assert "--out plan.yaml writes it for hfjax train --config plan.yaml" in capsys.readouterr().out


# --- the picture ----------------------------------------------------------------------------------


PICTURED = [
    "fsdp=8",
    "zero=zero1 accumulate=2",
    "pipe=4 schedule=1f1b",
    "pipe=2 schedule=zb-h1",
    "data=8 accumulate=16",
    "offload=1",
    "host_optimizer",
]


@pytest.mark.parametrize("why", PICTURED)
def test_a_picture_is_valid_and_adds_up_to_the_step(made, why):
    row = row_of(made, why)
    picture = timeline(made.plan, row)
    listed = [re.findall(r": ([\d.,]+) ms, ([\d.]+)%$", words) for words, *_ in picture.legend]
    ms = [float(found[0][0].replace(",", "")) for found in listed]
    end = next(n for n, (words, *_) in enumerate(picture.legend) if words.startswith("the step"))
    total = 1000 * row.time.total
    assert sum(ms[:end]) == pytest.approx(total, abs=0.006 * end)
    assert listed[end][0][1] == "100.0"
    assert ms[end] == pytest.approx(total, abs=0.006)
    assert picture.end == pytest.approx(total, rel=1e-6)
    assert ElementTree.fromstring(svg(picture)) is not None


@pytest.mark.short("zero=zero1 accumulate=2", "data=8 accumulate=16")
@pytest.mark.parametrize("why", PICTURED)
def test_boxes_of_a_line_do_not_overlap(made, why):
    spans = [s for s in timeline(made.plan, row_of(made, why)).spans if s.kind != "waiting"]
    for line in {s.line for s in spans}:
        there = sorted((s.start, s.end) for s in spans if s.line == line)
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(there))


# --- why ------------------------------------------------------------------------------------------


def test_why_shows_all_parts_beside_the_first_and_what_is_lost(made):
    text = answered(made, "pipe=4 zero=ddp")
    for words in (
        "pipe=4 data=2",
        "this one",
        "products",
        "bubble",
        "parameters and moments",
        "messages of stages, in a node",
        "It fits: ",
        "slower than the first",
    ):
        assert words in text, text
    found = asked(made, "pipe=4 zero=ddp").answer
    assert found is not None
    assert found.scored is not None
    assert found.num_matches > 1


def test_why_takes_the_best_of_those_that_agree(made):
    found = asked(made, "fsdp=8").answer
    assert found is not None
    assert found.scored is not None
    beside = asked(
        made, f"fsdp=8 remat={'full' if found.scored.candidate.remat != 'full' else 'none'}"
    )
    assert beside.answer is not None
    assert beside.answer.scored is not None
    assert found.scored.time.total <= beside.answer.scored.time.total


def test_why_of_the_first_says_so(made):
    c = made.plan.best.candidate
    words = [f"{axis}={n}" for axis, n in c.axis_sizes] + [f"zero={c.zero}", f"remat={c.remat}"]
    assert "It is the first of the plan." in answered(made, " ".join(words))


def test_small_numbers_of_bytes_are_not_zero(made):
    lines = "\n".join(shown_at(160, table_of(made)))
    assert "MiB" in lines
    assert "0.0 GiB" not in lines
    assert " 0.000" not in answered(made, "data=8 zero=ddp")


def test_why_that_says_all_is_scored_without_a_search(monkeypatch, capsys):
    monkeypatch.setattr(plan_command, "make_plan", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(plan_command, "_prepare", lambda: None)
    all_of = "fsdp=8 zero=fsdp remat=none accumulate=1"
    assert command([*FEW, "--batch", "128", "--why", all_of]) == 0
    lines = capsys.readouterr().out
    assert "nothing searched, since --why says all" in lines
    assert "It fits" in lines
    assert "the first" not in lines


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("fsdp=8 remat=every:2", "The search does not try it"),
        ("expert=2", "does not run"),
        ("accumulate=3", "which so many do not divide. These do: 1, 2, 4, 8, 16"),
        ("pipe=2 accumulate=2", "say microbatches="),
        ("schedule=1f1b pipe=1", "are of a pipeline"),
        ("pipe=2 schedule=1f1b chunks=2", "always has 1"),
        ("pipe=8", "does not run"),  # four layers
        ("data=2 tensor=2 fsdp=1 context=1 expert=1 pipe=1 row=1", "devices of 8"),
    ],
)
def test_what_was_not_searched_is_built_or_refused_in_words(made, why, told):
    assert told in answered(made, why)


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("pipe=3", "3 devices, which do not divide --count 8. pipe=2 would do, or --count 3."),
        ("tensor=4 pipe=4", "tensor=2 or pipe=2 would do, or --count 16"),
        ("tensr=2", "Did you mean tensor?"),
        ("speed=2", "Settings: accumulate, microbatches"),
        ("tensor=two", "tensor=NUMBER is expected"),
        ("tensor=2 tensor=4", "tensor is there twice"),
        ("zero=3", "zero= one of ddp, zero1, zero2, fsdp"),
        ("sequence=maybe", "sequence=no, is expected"),
        (" ", "it is empty"),
    ],
)
def test_words_that_mean_nothing_are_refused(why, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        parse_query(why, 8)


def test_transfers_are_told_by_purpose_and_place(made):
    row = made.plan.best
    found = transfer_totals(made.plan, ScoredCandidate(row.candidate, row.time, row.peak))
    seconds = sum(one["seconds"] for one in found.values())
    assert seconds == pytest.approx(row.time.transfers)


# --- what is refused ------------------------------------------------------------------------------


def test_tokens_must_be_whole_rows(capsys):
    told = error_of(capsys, *FEW, "--tokens-per-step", "1000", "--count", "8")
    assert "1,000 tokens are no whole rows of 16" in told
    assert "992 (62 rows) and 1,008 (63 rows)" in told


@pytest.mark.parametrize(("text", "rows"), [("4K", 256), ("1_600", 100), ("1M", 65536)])
def test_tokens_are_rows(text, rows):
    assert step_batch_size(replace(GIVEN, tokens_per_step=text), "tokens", LENGTH) == rows


def test_images_have_rows_and_no_tokens():
    with pytest.raises(ValueError, match="Say by --batch how many"):
        step_batch_size(replace(GIVEN, tokens_per_step="4M"), "images", 1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tokens-per-step", "many"], "a number is expected, as in 1_000_000"),
        (["--tokens-per-step", "1K", "--batch", "8"], "both say how many rows"),
        (["--strategy", "fsdp"], 'hfjax plan searches that. To see one configuration beside'),
        (["--mesh.pipe", "2"], '--why "tensor=2"'),
        (["--pipeline.name=zb-h1"], "schedule=1f1b"),
        (["--remat", "full"], '--why "remat=full"'),
        (["--cpu-devices", "8"], "is said by --count"),
        (["--deepspeed", "ds.json"], "its file says how a run is laid out"),
        (["--gpu", "b300"], "there are constants of a100, b200, h100, h200"),
        (["--gpu", "none.toml"], "there is no such file"),
        (["--count", "12"], "--count 8 or 16 would do, or up to 8 in one node"),
        (["--out", "plan.json"], "it is a .yaml file"),
        (["--picture", "plan.jpg"], "plan.jpg: a picture is an .svg or a .png file"),
        (["--why", "wide=3"], "no axis or setting 'wide'"),
        (["--device-memory", "much"], "a size is expected"),
        (["--model.preset", "gpt-none"], "--model.preset gpt-none: one of"),
        (["--model.length", "0"], "--model.length 0: a number from 1 on is needed"),
        (["--rows", "50"], "--rows 50: a number from 1 to 20 is needed"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_words(capsys, words, told):
    assert told in error_of(capsys, *FEW, *words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--lr 0.1", "--lr: there is no such flag. Did you mean --optimizer.rate?"),
        ("--batch-size=8", "--batch-size: there is no such flag. Did you mean --batch?"),
        ("--mesh fsdp=8", "--mesh: there is no such flag. Give one of these, with its value: --me"),
        ("--modle.length 3", "Did you mean --model.length?"),
        ("--heads 2", "Did you mean --model.heads?"),
        ("--xyzzy", "--xyzzy: there is no such flag. --help lists all flags."),
    ],
)
def test_a_flag_that_is_not_there_gets_the_nearest_in_every_command(capsys, words, told):
    for argv in ("train", "memory"):
        with pytest.raises(SystemExit) as end:
            hfjax_command([argv, *words.split()])
        assert end.value.code == 2
        assert told in capsys.readouterr().err


def test_what_nothing_divides_is_told_with_what_does(capsys):
    told = error_of(capsys, *FEW, "--batch", "7", "--count", "8", "--model.layers", "1")
    assert "7 rows of 16 tokens on 8 devices: no mesh divides them." in " ".join(told.split())
    assert "These divide: 8 (128 tokens), 16 (256 tokens)." in " ".join(told.split())


def test_a_model_that_fits_nowhere_is_told_with_what_would_do(capsys):
    words = ("--vocab", "50304", "--count", "2", "--batch", "2", "--device-memory", "1MiB")
    told = error_of(capsys, *FEW, *words)
    assert "nothing fits" in told
    assert "devices would do" in told


def test_a_file_says_what_is_run_and_its_layout_is_searched_anew(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("steps: 7\nstrategy: fsdp\nmesh: {fsdp: 8}\nremat: full\n")
    default = config_io.load(path)
    given = plan_settings(default)
    assert (given.steps, given.strategy, given.remat) == (7, "ddp", "none")
    assert plan_command.ignored_settings(default) == ["strategy", "remat", "mesh.fsdp"]


# --- constants ------------------------------------------------------------------------------------


def measured(tmp_path: Path, device: str, version: str) -> Path:
    path = tmp_path / "mine.toml"
    replace(MACHINES["h200"], calibrated=Calibration(device, version, "2026-11-26")).write(path)
    return path


def test_constants_of_a_file_are_taken(tmp_path):
    found = constants_of(str(measured(tmp_path, "NVIDIA H200", jax.__version__)))
    assert (found.machine.key, found.notes) == ("h200", ())


def test_constants_measured_on_another_gpu_are_refused(tmp_path):
    with pytest.raises(ValueError, match="measured on NVIDIA A100"):
        constants_of(str(measured(tmp_path, "NVIDIA A100-SXM4-80GB", jax.__version__)))


def test_constants_measured_with_another_jax_are_told(tmp_path):
    (note,) = constants_of(str(measured(tmp_path, "NVIDIA H200", "0.0.1"))).notes
    assert "measured with jax 0.0.1" in note


def test_here_takes_what_was_measured_here_and_refuses_what_was_not(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hardware, "local_device_kind", lambda: "NVIDIA H200")
    assert "none were measured" in constants_of("here").notes[0]
    place = hardware.calibration_path("NVIDIA H200")
    place.parent.mkdir(parents=True)
    place.write_text(measured(tmp_path, "NVIDIA H200", "0.0.1").read_text())
    with pytest.raises(ValueError, match=r"was calibrated on NVIDIA H200 with jax 0\.0\.1"):
        constants_of("here")
    place.write_text(measured(tmp_path, "NVIDIA H200", jax.__version__).read_text())
    assert constants_of("here").notes == ()


def test_here_without_constants_says_how_to_measure_them_and_names_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hardware, "local_device_kind", lambda: "cpu")
    with pytest.raises(ValueError, match=r"no constants of cpu\. Measure them .*name a GPU: a100"):
        constants_of("here")


@pytest.mark.slow
def test_what_is_calibrated_here_is_planned_with(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(plan_command, "calibrate", partial(calibrate, quick=True))
    assert command(["--calibrate", "here"]) == 0
    assert "hfjax plan --gpu here takes it" in capsys.readouterr().out
    monkeypatch.setattr(hardware, "local_device_kind", lambda: "cpu")
    machine = constants_of("here").machine
    assert machine == Machine.load(tmp_path / "hfjax/machines/cpu.toml")
    assert (machine.platform, machine.per_node) == ("cpu", jax.device_count())
    plan = build_plan(replace(GIVEN, count=2, batch=4), Train(), Constants(machine)).plan
    assert plan.memory == machine.memory
    assert any("as if each device had a core" in note for note in plan.notes)


# --- compiled rows --------------------------------------------------------------------------------


def test_rows_that_were_compiled_are_marked(made):
    first, *others = made.plan.entries
    plan = replace(made.plan, entries=(replace(first, compiled=object()), *others))
    lines = shown_at(200, table_of(replace(made, plan=plan)))
    assert "the first 1 compiled, in" in " ".join(lines[:3])
    unit = ByteScale.of(max(row.peak.total for row in plan.entries)).bytes
    assert any(f"{first.peak.total / unit:.1f}c " in line for line in lines)
    assert any("as compiled" in line for line in lines)


def test_the_command_says_how_many_are_compiled(monkeypatch, made):
    asked_for = []
    monkeypatch.setattr(
        plan_command,
        "make_plan",
        lambda *_, **given: asked_for.append(given["compile"]) or made.plan,
    )
    build_plan(replace(GIVEN, compile=3, cache=Path("kept")), Train(), constants_of("h200"))
    assert (asked_for[0].best, asked_for[0].cache) == (3, Path("kept"))


def test_without_a_compiler_the_heading_says_formulas_and_why(made, monkeypatch):
    monkeypatch.setattr(hardware, "can_compile_for_gpus", lambda: False)
    asked_for = replace(made, settings=replace(GIVEN, compile=4))
    head = " ".join(heading(made.plan, asked_for))
    assert "predicted by formulas (nothing here compiles for CUDA: pip install" in head
    assert hardware.why_not_compiled("a100") == "hfjax compiles for h100 and h200"


# --- models and Python ----------------------------------------------------------------------------


def test_a_model_of_ones_own_without_parts_is_planned_with_a_note():
    given = replace(GIVEN, model=BIGRAMS, batch=4, count=2)
    found = build_plan(given, Train(), constants_of("h200"))
    assert found.plan.best.fits
    assert any("not in three parts" in note for note in found.plan.notes)
    assert {row.candidate.remat for row in found.plan.entries} == {"none"}


def test_make_plan_is_public():
    assert hfjax.make_plan.__module__ == "hfjax.planner.make_plan"
    assert "make_plan" in dir(hfjax)


def test_the_help_names_the_command(capsys):
    assert hfjax_command(["--help"]) == 0
    assert "plan       find the fastest layout" in capsys.readouterr().out


@pytest.mark.parametrize("given", ["80", "1KiB", "1000000GiB"])
def test_a_memory_that_no_gpu_has_is_refused(given, capsys):
    told = error_of(capsys, *FEW, "--count", "2", "--batch", "2", "--device-memory", given)
    assert "From 1MiB to 1TiB are" in " ".join(told.split())


@pytest.mark.parametrize("flag", ["--out plan.yaml", "--json plan.json", "--picture plan.svg"])
def test_what_cannot_be_written_is_told_before_anything_is_searched(flag, capsys, tmp_path):
    name, file = flag.split()
    path = tmp_path / "missing" / file
    told = error_of(capsys, *FEW, "--count", "2", "--batch", "2", name, str(path))
    assert "nothing can be written to" in " ".join(told.split())
