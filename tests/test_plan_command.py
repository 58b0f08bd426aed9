"""`hfjax plan`: the table, a layout beside the best, what is written, and what is refused."""

import io
import json
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import pytest
from rich.console import Console

import hfjax
from hfjax.__main__ import main as hfjax_command
from hfjax.cli.arguments import parse_flags
from hfjax.cli.draw_timeline import svg
from hfjax.cli.plan import command as plan_command, hardware
from hfjax.cli.plan.command import (
    PlanReport,
    as_json,
    as_yaml,
    build_plan,
    find_query,
    main as command,
)
from hfjax.cli.plan.compare import Answer, find_answer, full_query
from hfjax.cli.plan.compare_table import layout_report, transfer_totals
from hfjax.cli.plan.hardware import Constants, constants_of
from hfjax.cli.plan.settings import PlanSettings, plan_settings, step_batch_size
from hfjax.cli.plan.table import ByteScale, heading, notes_of, plan_table, write
from hfjax.cli.plan.timeline import timeline
from hfjax.hardware.machine import MACHINES, Calibration, Machine
from hfjax.parallel.mesh import AXES
from hfjax.planner.calibration.calibrate import calibrate
from hfjax.planner.candidate import ZERO_STAGES, Candidate
from hfjax.planner.make_plan import PlanEntry
from hfjax.planner.programs.compile_step import ProgramStats
from hfjax.planner.score import ScoredCandidate
from hfjax.trainer import config_io
from hfjax.trainer.config import MeshConfig, ModelConfig, TrainConfig
from tests.small_run import BIGRAMS

LENGTH = 16
MODEL = ModelConfig(preset="gpt-tiny", seq_len=LENGTH, num_layers=4, num_heads=2, hidden_size=32)
GIVEN = PlanSettings(
    model=MODEL, global_batch_size=128, vocab=64, count=8, compile=0, precision="bf16"
)
SMALL = "--model.seq-len 16 --model.num-layers 4 --model.num-heads 2 --model.hidden-size 32".split()
FEW = [*SMALL, "--vocab", "64", "--compile", "0"]  # of the command line


@pytest.fixture(scope="module")
def made() -> PlanReport:
    return build_plan(GIVEN, TrainConfig(), constants_of("h200"))


def shown_at(width: int, group) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=True, color_system=None).print(group)
    return file.getvalue().splitlines()


def table_of(made: PlanReport):
    notes = [*notes_of(made.plan, made.settings), *made.notes]
    return plan_table(made.plan, made.settings.top, list(heading(made.plan, made)), notes)


def query_in(flags: str) -> tuple[PlanSettings, str, dict[str, Any]]:
    """Return what `hfjax plan` makes of these flags: settings, text and query."""
    settings = parse_flags(PlanSettings, flags.split(), "plan", GIVEN, config=True)
    return settings, *find_query(settings, flags.split())


def asked(made: PlanReport, flags: str) -> PlanReport:
    settings, text, query = query_in(flags)
    found = find_answer(made.plan, query, lambda words: None)
    query = tuple(query.items())
    return replace(made, settings=settings, compared=text, query=query, answer=found)


def answer_of(made: PlanReport, flags: str) -> Answer:
    answer = asked(made, flags).answer
    assert answer is not None
    return answer


def row_of(made: PlanReport, flags: str) -> PlanEntry:
    row = plan_command._answer_entry(answer_of(made, flags), made.plan)
    assert row is not None
    return row


def answered(made: PlanReport, flags: str) -> str:
    found = asked(made, flags)
    assert found.answer is not None
    lines = shown_at(160, layout_report(made.plan, found.answer, found.compared))
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
    assert len(times) >= made.settings.top
    for row in made.plan.entries:
        assert row.time.total == pytest.approx(sum(row.time.parts.values()))
        assert row.fits
        assert row.reason or row is made.plan.best


def test_a_terminal_of_80_columns_shows_every_number(made):
    lines = shown_at(80, table_of(made))
    assert max(map(len, lines)) <= 80
    head = " ".join(line.strip() for line in lines[:5])
    for words in (
        "gpt-tiny on 8 x NVIDIA H200",
        "2,048 tokens in a step (128 sequences of 16 tokens)",
    ):
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
    rows = made.plan.entries[: made.settings.top]
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
    found = json.loads(json.dumps(as_json(asked(made, "--mesh.tensor 2"))))
    assert found["global_batch_size"] == 128
    assert len(found["entries"]) == len(made.plan.entries)
    first = found["entries"][0]
    assert first["seconds"]["total"] == pytest.approx(made.plan.best.time.total)
    assert first["settings"]["global_batch_size"] == 128
    assert found["compared"]["layout"] == "--mesh.tensor 2"
    assert found["compared"]["fields"] == {"tensor": 2}
    assert found["compared"]["refusal"] == ""
    assert found["compared"]["entry"]["bytes"]["total"] > 0


def test_the_command_writes_all_files(tmp_path, monkeypatch, capsys, made):
    monkeypatch.setattr(plan_command, "build_plan", lambda *_: replace(made, settings=given))
    paths = {name: tmp_path / f"plan{end}" for name, end in ENDINGS.items()}
    given = replace(GIVEN, **paths)
    words = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    assert hfjax_command(["plan", *FEW, "--global-batch-size", "16", *words]) == 0
    assert all(path.exists() for path in paths.values())
    assert "hfjax train --config" in capsys.readouterr().out


ENDINGS = {"plan": ".yaml", "json": ".json", "picture": ".svg"}


def test_without_a_file_the_command_says_how_to_write_one(monkeypatch, capsys, made):
    monkeypatch.setattr(plan_command, "build_plan", lambda *_: made)
    assert command([*FEW, "--global-batch-size", "16"]) == 0
    told = capsys.readouterr().out
    assert "--plan plan.yaml writes it for hfjax train --config plan.yaml" in told


# --- the picture ----------------------------------------------------------------------------------


PICTURED = [
    "--mesh.fsdp 8",
    "--zero 1 --gradient-accumulation-steps 2",
    "--mesh.pipe 4 --pipeline.schedule 1f1b",
    "--mesh.pipe 2 --pipeline.schedule zb-h1",
    "--mesh.data 8 --gradient-accumulation-steps 16",
    "--offload.activations 1",
    "--offload.optimizer",
]


@pytest.mark.parametrize("flags", PICTURED)
def test_a_picture_is_valid_and_adds_up_to_the_step(made, flags):
    row = row_of(made, flags)
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


@pytest.mark.short(PICTURED[1], PICTURED[4])
@pytest.mark.parametrize("flags", PICTURED)
def test_boxes_of_a_line_do_not_overlap(made, flags):
    spans = [s for s in timeline(made.plan, row_of(made, flags)).spans if s.kind != "waiting"]
    for line in {s.line for s in spans}:
        there = sorted((s.start, s.end) for s in spans if s.line == line)
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(there))


# --- one layout beside the best -------------------------------------------------------------------


def test_a_layout_is_shown_part_by_part_beside_the_first_with_what_is_lost(made):
    text = answered(made, "--mesh.pipe 4 --zero 0")
    for words in (
        "--mesh.pipe 4 --zero 0: pipe=4 data=2, ddp, ",
        "this one",
        "products",
        "bubble",
        "parameters and optimizer state",
        "messages of stages, in a node",
        "It fits: ",
        "slower than the first",
    ):
        assert words in text, text
    found = answer_of(made, "--mesh.pipe 4 --zero 0")
    assert found.scored is not None
    assert found.num_matches > 1


def test_part_of_a_layout_means_the_best_of_those_that_agree(made):
    found = answer_of(made, "--mesh.fsdp 8").scored
    assert found is not None
    beside = answer_of(
        made, f"--mesh.fsdp 8 --remat {'full' if found.candidate.remat != 'full' else 'none'}"
    ).scored
    assert beside is not None
    assert found.time.total <= beside.time.total


WHOLE = (
    "--mesh.pipe 4 --mesh.data 2 --zero 1 --pipeline.schedule 1f1b --pipeline.microbatches 16 "
    "--remat full"
)


def test_a_whole_layout_is_the_one_of_the_search_that_agrees(made):
    found = answer_of(made, WHOLE)
    whole = Candidate((("pipe", 4), ("data", 2)), "zero1", 128, False, "1f1b", 1, 16, remat="full")
    assert (found.num_matches, found.queried_candidate) == (1, whole)
    text = answered(made, WHOLE)
    assert "One of the ways that were searched is this one." in text
    assert "slower than the first" in text
    assert " the first " in text


def test_the_first_is_told_to_be_the_first(made):
    c = made.plan.best.candidate
    sizes = [f"--mesh.{axis} {n}" for axis, n in c.axis_sizes]
    flags = [*sizes, "" if c.zero == "fsdp" else f"--zero {ZERO_STAGES.index(c.zero)}"]
    assert "It is the first of the plan." in answered(made, " ".join([*flags, "--remat", c.remat]))


def test_all_remaining_devices_say_the_size_of_every_axis(made):
    asked_for = "--mesh.fsdp -1 --mesh.tensor 2"
    _, _, query = query_in(asked_for)
    sizes = {**dict.fromkeys(AXES, 1), "fsdp": 4, "tensor": 2}
    assert query == {**sizes, "zero": "fsdp"}
    c = answer_of(made, asked_for).queried_candidate
    assert c is not None
    assert dict(c.axis_sizes) == {"fsdp": 4, "tensor": 2}
    _, _, query = query_in("--mesh.fsdp -1 --mesh.tensor 8")  # one device remains
    assert query == {**dict.fromkeys(AXES, 1), "tensor": 8}


def test_flags_mean_the_fields_of_a_candidate():
    flags = "--no-sequence-parallel --gradient-accumulation-steps 1 --tensor-overlap-chunks 2"
    more = "--offload.activations None --offload.no-optimizer --gradient-reduction flat --zero 2"
    _, text, query = query_in(f"{flags} {more}")
    assert text == f"{flags} {more}"
    assert query == {
        **{
            "sequence": False,
            "gradient_accumulation_steps": 1,
            "tensor_overlap_chunks": 2,
            "offload": None,
        },
        **{"host_optimizer": False, "gradient_reduction": "flat", "zero": "zero2"},
    }
    _, _, query = query_in("--mesh.row 2 --mesh.tensor 2 --sequence-parallel")
    assert query == {"row": 2, "tensor": 2, "sequence": False}  # a grid has no such choice
    _, _, query = query_in("--pipeline.schedule interleaved --pipeline.chunks 4")
    assert query == {"schedule": "interleaved", "chunks": 4}
    _, _, query = query_in("--steps 3 --lr 0.1")
    assert query == {}


def test_small_numbers_of_bytes_are_not_zero(made):
    lines = "\n".join(shown_at(160, table_of(made)))
    assert "MiB" in lines
    assert "0.0 GiB" not in lines
    assert " 0.000" not in answered(made, "--mesh.data 8 --zero 0")


@pytest.mark.parametrize("flags", ["--mesh.pipe 4 --zero 0", WHOLE])
def test_the_command_compares_the_layout_of_its_flags(flags, monkeypatch, capsys, made):
    monkeypatch.setattr(plan_command, "build_plan", lambda *_: made)
    monkeypatch.setattr(plan_command, "_configure_jax", lambda: None)
    assert command([*FEW, "--global-batch-size", "128", *flags.split()]) == 0
    shown = capsys.readouterr().out
    assert f"{flags}: pipe=4 data=2" in shown
    assert "It fits" in shown
    assert "slower than the first" in shown
    assert "This one: --plan plan.yaml writes it" in shown


def test_a_layout_that_does_not_run_is_not_written(monkeypatch, capsys, made, tmp_path):
    monkeypatch.setattr(
        plan_command, "build_plan", lambda settings, *_: replace(made, settings=settings)
    )
    monkeypatch.setattr(plan_command, "_configure_jax", lambda: None)
    path = tmp_path / "plan.yaml"
    told = error_of(capsys, *FEW, "--mesh.pipe", "8", "--plan", str(path))
    assert "--mesh.pipe 8 does not run; none is written." in told
    assert not path.exists()


def test_a_layout_that_was_compiled_has_the_numbers_of_its_entry(made):
    first, *others = made.plan.entries
    peak = replace(first.peak, kept=first.peak.kept + 2**30)
    entry = replace(first, peak=peak, compiled=ProgramStats(peak.total, 0, 0, 0, ()))
    plan = replace(made.plan, entries=(entry, *others))
    query = full_query(plan.settings(entry), plan.count)
    found = find_answer(plan, query, lambda words: None)
    assert found.scored is not None
    assert found.scored.peak == peak
    text = "\n".join(shown_at(160, layout_report(plan, found, "a file")))
    assert "It is the first of the plan." in text


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--mesh.fsdp 8 --remat every:2", "The search does not try it"),
        ("--mesh.expert 2", "does not run"),
        (
            "--gradient-accumulation-steps 3",
            "--gradient-accumulation-steps 3: a device has 16 examples (128 over data=8), which so "
            "many do not divide. These do: 1, 2, 4, 8, 16",
        ),
        (
            "--mesh.pipe 2 --gradient-accumulation-steps 2",
            "beside --mesh.pipe 2: microbatches of a pipeline do the same. Give "
            "--pipeline.microbatches 16 in its place.",
        ),
        (
            "--mesh.pipe 2 --pipeline.microbatches 7",
            "--pipeline.microbatches 7: a device has 32 examples (128 over data=4), which",
        ),
        ("--pipeline.schedule 1f1b --mesh.pipe 1", "are of a pipeline, and --mesh.pipe is 1. Give"),
        ("--mesh.pipe 8", "does not run"),  # four layers
        (
            "--mesh.data 2 --mesh.tensor 2 --mesh.fsdp 1 --mesh.context 1 --mesh.expert 1 "
            "--mesh.pipe 1 --mesh.row 1",
            "--mesh.data 2 --mesh.tensor 2: that is a mesh of 4 of the 8 devices. Leave out the "
            "size of an axis, or give --count 4.",
        ),
        (
            "--offload.activations dots",
            "--offload.activations dots: a plan has no formula for its bytes. Give a fraction",
        ),
    ],
)
def test_what_was_not_searched_is_built_or_refused_in_words(made, flags, told):
    assert told in answered(made, flags)


def test_what_is_not_given_has_the_default_of_a_run(made):
    found = answer_of(made, "--mesh.tensor 2 --mesh.context 2 --remat every:2").queried_candidate
    config = TrainConfig(
        mesh=MeshConfig(tensor=2, context=2), remat="every:2", global_batch_size=128
    )
    assert found == Candidate.of(config, 8)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            "--mesh.pipe 3",
            "--mesh.pipe 3: 3 devices, which do not divide --count 8. --mesh.pipe 2 would do, or "
            "--count 3.",
        ),
        (
            "--mesh.tensor 4 --mesh.pipe 4",
            "--mesh.tensor 2 or --mesh.pipe 2 would do, or --count 16.",
        ),
        ("--mesh.fsdp -1 --mesh.tensor 3", "--mesh.fsdp -1 --mesh.tensor 3: 3 devices are needed"),
        ("--mesh.fsdp -1 --mesh.tensor 16", "Lower a size, or ask for more devices: --count 16"),
        (
            "--mesh.fsdp -1 --mesh.tensor -1",
            "--mesh.fsdp -1 and --mesh.tensor -1: only one axis can take all remaining devices.",
        ),
        ("--mesh.tensor 0", "--mesh.tensor 0: a number of devices is needed, or -1 for all"),
        ("--mesh.tensor -2", "--mesh.tensor -2: a number of devices is needed, or -1 for all"),
        ("--mesh.tensr 2", "--mesh.tensr: there is no such flag. Did you mean --mesh.tensor?"),
        ("--speed 2", "--speed: there is no such flag."),
        ("--mesh.tensor=", "--mesh.tensor: its value is empty. Give one, or leave the flag out."),
        ("--zero 3", "--zero 3: parameters are sharded over --mesh.fsdp, which is 1."),
        ("--zero 1 --mesh.fsdp 8", "--zero 1 beside --mesh.fsdp 8: --mesh.fsdp shards parameters"),
        ("--mesh.row 2", "--mesh.row 2: a tensor grid has columns too. Give --mesh.tensor 2"),
        (
            "--mesh.pipe 2 --pipeline.schedule 1f1b --pipeline.chunks 2",
            "--pipeline.schedule 1f1b: chunks=2: 1f1b has 1 on each stage.",
        ),
        ("--gradient-accumulation-steps 0", "--gradient-accumulation-steps 0: a number from 1 on"),
        (
            "--gradient-accumulation-steps 129",
            "--gradient-accumulation-steps 129: more than --global-batch-size 128 has examples.",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_the_names_of_its_flags(flags, told, capsys):
    assert told in error_of(capsys, *FEW, "--global-batch-size", "128", *flags.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--mesh.tensor two", "error parsing --mesh.tensor: "),
        ("--zero 4", "invalid choice"),
        ("--sequence-parallel maybe", "unrecognized"),
    ],
)
def test_values_of_another_kind_are_refused(capsys, words, told):
    assert told in error_of(capsys, *FEW, *words.split()).lower()


def test_microbatches_are_not_held_to_a_batch_that_tokens_say():
    flags = "--tokens-per-step 4K --gradient-accumulation-steps 256"
    given = parse_flags(PlanSettings, flags.split(), "plan", plan_settings(TrainConfig()), True)
    assert given.gradient_accumulation_steps == 256


# --- a file beside the best -----------------------------------------------------------------------


def file_query(path: Path) -> dict[str, Any]:
    return find_query(replace(GIVEN, compare=path), [])[1]


def test_a_file_of_the_plan_is_the_first_of_the_plan(made, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plan_command, "build_plan", lambda *_: made)
    monkeypatch.setattr(plan_command, "_configure_jax", lambda: None)
    path, again = tmp_path / "plan.yaml", tmp_path / "again.yaml"
    path.write_text(as_yaml(made.plan, made.plan.best))
    words = [*FEW, "--global-batch-size", "128", "--compare", str(path), "--plan", str(again)]
    assert command(words) == 0
    shown = capsys.readouterr().out
    assert f"{path}: " in shown
    assert "One of the ways that were searched is this one." in shown
    assert "It is the first of the plan." in shown
    report = replace(made, settings=replace(GIVEN, plan=again), compared=str(path))
    answer = find_answer(made.plan, file_query(path), lambda words: None)
    plan_command._write_files(replace(report, answer=answer), Console(file=io.StringIO()))
    assert again.read_text() == path.read_text()


def test_a_file_of_any_entry_is_that_entry(made, tmp_path):
    path = tmp_path / "plan.yaml"
    for entry in made.plan.entries[::4]:
        path.write_text(as_yaml(made.plan, entry))
        found = find_answer(made.plan, file_query(path), lambda words: None)
        assert (found.num_matches, found.queried_candidate) == (1, entry.candidate)


def test_a_file_says_the_whole_layout(made, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("steps: 7\nremat: full\nmesh: {fsdp: 4}\n")  # data has what remains
    found = find_answer(made.plan, file_query(path), lambda words: None)
    whole = Candidate((("data", 2), ("fsdp", 4)), "fsdp", 128, remat="full")
    assert (found.num_matches, found.queried_candidate) == (1, whole)
    path.write_text("steps: 7\nremat: full\nmesh: {fsdp: -1}\n")
    found = find_answer(made.plan, file_query(path), lambda words: None)
    whole = Candidate((("fsdp", 8),), "fsdp", 128, remat="full")
    assert (found.num_matches, found.queried_candidate) == (1, whole)
    path.write_text("gradient_accumulation_steps: 2\nmesh: {pipe: 4}\n")
    found = find_answer(made.plan, file_query(path), lambda words: None)
    assert "--gradient-accumulation-steps 2 beside --mesh.pipe 4" in found.refusal


def test_a_file_of_before_is_read(made, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("strategy: fsdp+tensor\nmesh: {tensor: 2}\naccumulate: 2\n")
    with pytest.warns(UserWarning, match="accumulate is gradient_accumulation_steps"):
        query = file_query(path)
    found = find_answer(made.plan, query, lambda words: None)
    whole = Candidate((("fsdp", 4), ("tensor", 2)), "fsdp", 128, gradient_accumulation_steps=2)
    assert (found.num_matches, found.queried_candidate) == (1, whole)


def test_a_python_file_is_compared_too(made, tmp_path):
    path = tmp_path / "run.py"
    path.write_text(
        "from hfjax.trainer import TrainConfig\nconfig = TrainConfig(zero=2, remat='dots')\n"
    )
    found = find_answer(made.plan, file_query(path), lambda words: None)
    assert found.queried_candidate == Candidate((("data", 8),), "zero2", 128, remat="dots")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "there is no such file"),
        ("mesh: {fsdp: 16}", "--mesh.fsdp 16: 16 devices are needed, and there are 8. Lower a"),
        ("mesh: {data: 2}", "--mesh.data 2: 2 of the 8 devices are used"),
        ("mesh: {tensor: 3}", "3 devices are needed, and there are 8. Give sizes whose product"),
        ("colour: red", "no field 'colour'"),
        ("context: {form: ring}\nmesh: {context: 2}", "it has context.form, and a plan has no"),
        ("strategy: mine.py:table", "it has strategy, and a plan has no formula for that."),
        ("offload: {parameters: true}", "it has offload.parameters, and a plan has no formula"),
        ("deepspeed: ds.json", "it has deepspeed, and a plan has no formula for that."),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_compared_is_refused_in_words(text, told, tmp_path):
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(told)) as wrong:
        file_query(path)
    assert "run.yaml" in str(wrong.value)
    assert "--config" not in str(wrong.value)


def test_transfers_are_told_by_purpose_and_place(made):
    row = made.plan.best
    found = transfer_totals(made.plan, ScoredCandidate(row.candidate, row.time, row.peak))
    seconds = sum(one["seconds"] for one in found.values())
    assert seconds == pytest.approx(row.time.transfers)


# --- what is refused ------------------------------------------------------------------------------


def test_tokens_must_be_whole_rows(capsys):
    told = error_of(capsys, *FEW, "--tokens-per-step", "1000", "--count", "8")
    assert "1,000 tokens are no whole sequences of 16 (--model.seq-len)" in told
    assert "992 (62 examples) and 1,008 (63 examples)" in told


@pytest.mark.parametrize(("text", "rows"), [("4K", 256), ("1_600", 100), ("1M", 65536)])
def test_tokens_are_rows(text, rows):
    assert step_batch_size(replace(GIVEN, tokens_per_step=text), "tokens", LENGTH) == rows


def test_images_have_rows_and_no_tokens():
    with pytest.raises(ValueError, match=r"the model is of images\. Give --global-batch-size"):
        step_batch_size(replace(GIVEN, tokens_per_step="4M"), "images", 1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tokens-per-step", "many"], "a number is expected, as in 1_000_000"),
        (["--tokens-per-step", "1K", "--global-batch-size", "8"], "both say how many examples"),
        (["--strategy", "fsdp"], "The sizes of the mesh say which layout to compare with the"),
        (["--context.form", "ring"], "--context.form: a plan has no formula for it. hfjax mem"),
        (["--offload.parameters"], "--offload.parameters: a plan has no formula for it."),
        (["--mesh.pipe", "3"], "--mesh.pipe 3: 3 devices, which do not divide --count 8."),
        (["--mesh.pipe", "2", "--compare", "a.yaml"], "--mesh.pipe beside --compare: the file"),
        (["--no-sequence-parallel", "--compare=a.yaml"], "--no-sequence-parallel beside --comp"),
        (["--compare", "none.yaml"], "--compare none.yaml: there is no such file."),
        (["--cpu-devices", "8"], "--cpu-devices: the number of GPUs is --count."),
        (["--deepspeed", "ds.json"], "its file says how a run is laid out"),
        (["--gpu", "b300"], "there are constants of a100, b200, h100, h200"),
        (["--gpu", "none.toml"], "there is no such file"),
        (["--count", "12"], "--count 8 or 16 would do, or up to 8 in one node"),
        (["--plan", "plan.json"], "--plan plan.json: a .yaml file is written"),
        (["--out", "plan.yaml"], "--out is --plan now."),
        (["--picture", "plan.jpg"], "plan.jpg: a picture is an .svg or a .png file"),
        (["--why", "pipe=8"], "--why is --compare now."),
        (["--device-memory", "much"], "a size is expected"),
        (["--model.preset", "gpt-none"], "--model.preset gpt-none: one of"),
        (["--model.seq-len", "0"], "--model.seq-len 0: a number from 1 on is needed"),
        (["--top", "50"], "--top 50: a number from 1 to 20 is needed"),
        (["--rows", "5"], "--rows is --top now."),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_words(capsys, words, told):
    assert told in error_of(capsys, *FEW, *words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--learning-rate 0.1", "no such flag. Did you mean --optimizer.learning-rate?"),
        (
            "--batch-size=8",
            "--batch-size: there is no such flag. Did you mean --global-batch-size?",
        ),
        ("--mesh fsdp=8", "--mesh: there is no such flag. Give one of these, with its value: --me"),
        ("--modle.seq-len 3", "Did you mean --model.seq-len?"),
        ("--heads 2", "Did you mean --model.num-heads?"),
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
    words = ("--global-batch-size", "7", "--count", "8", "--model.num-layers", "1")
    told = error_of(capsys, *FEW, *words)
    assert "7 sequences of 16 tokens on 8 devices: no mesh divides them." in " ".join(told.split())
    assert "These divide: 8 (128 tokens), 16 (256 tokens)." in " ".join(told.split())


def test_a_model_that_fits_nowhere_is_told_with_what_would_do(capsys):
    words = ("--vocab", "50304", "--count", "2", "--global-batch-size", "2")
    told = error_of(capsys, *FEW, *words, "--device-memory", "1MiB")
    assert "nothing fits" in told
    assert "devices would do" in told


def test_a_file_says_what_is_run_and_its_layout_is_searched_anew(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("steps: 7\nmesh: {fsdp: 8}\nremat: full\noffload: {optimizer: true}\n")
    default = config_io.load(path)
    given = plan_settings(default)
    assert (given.steps, given.mesh, given.remat) == (7, MeshConfig(), "none")
    assert not given.offload.optimizer
    ignored = plan_command.ignored_settings(default)
    assert ignored == ["remat", "mesh.fsdp", "offload.optimizer"]


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
    given = replace(GIVEN, count=2, global_batch_size=4)
    plan = build_plan(given, TrainConfig(), Constants(machine)).plan
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
    given = replace(GIVEN, compile=3, compilation_cache=Path("kept"))
    build_plan(given, TrainConfig(), constants_of("h200"))
    assert (asked_for[0].best, asked_for[0].cache) == (3, Path("kept"))


def test_without_a_compiler_the_heading_says_formulas_and_why(made, monkeypatch):
    monkeypatch.setattr(hardware, "can_compile_for_gpus", lambda: False)
    asked_for = replace(made, settings=replace(GIVEN, compile=4))
    head = " ".join(heading(made.plan, asked_for))
    assert "predicted by formulas (nothing here compiles for CUDA: pip install" in head
    assert hardware.why_not_compiled("a100") == "hfjax compiles for h100 and h200"


# --- models and Python ----------------------------------------------------------------------------


def test_a_model_of_ones_own_without_parts_is_planned_with_a_note():
    given = replace(GIVEN, model=BIGRAMS, global_batch_size=4, count=2)
    found = build_plan(given, TrainConfig(), constants_of("h200"))
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
    words = ("--count", "2", "--global-batch-size", "2", "--device-memory", given)
    told = error_of(capsys, *FEW, *words)
    assert "From 1MiB to 1TiB are" in " ".join(told.split())


@pytest.mark.parametrize("flag", ["--plan plan.yaml", "--json plan.json", "--picture plan.svg"])
def test_what_cannot_be_written_is_told_before_anything_is_searched(flag, capsys, tmp_path):
    name, file = flag.split()
    path = tmp_path / "missing" / file
    told = error_of(capsys, *FEW, "--count", "2", "--global-batch-size", "2", name, str(path))
    assert "nothing can be written to" in " ".join(told.split())
