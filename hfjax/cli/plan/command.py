"""`hfjax plan`: finds the best layouts of a step on many GPUs, before anything runs."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import yaml
from rich.console import Console, Group

from hfjax.cli import draw_timeline
from hfjax.cli.arguments import parse_flags
from hfjax.cli.plan.compare import Answer, find_answer, full_query, query_of
from hfjax.cli.plan.compare_table import layout_report, transfer_totals
from hfjax.cli.plan.hardware import (
    Constants,
    calibration_path,
    check_whole_nodes,
    constants_of,
    why_not_compiled,
)
from hfjax.cli.plan.settings import (
    PlanSettings,
    check_compared,
    check_flags,
    check_no_deepspeed,
    ignored_settings,
    layout_flags,
    plan_settings,
    run_flags,
    run_of,
    step_batch_size,
)
from hfjax.cli.plan.table import heading, heading_lines, note_lines, notes_of, plan_table, write
from hfjax.cli.plan.timeline import timeline
from hfjax.cli.train import check_recipe, config_of
from hfjax.planner.calibration.calibrate import calibrate
from hfjax.planner.make_plan import (
    CompileOptions,
    PlanEntry,
    StepPlan,
    make_plan,
    plan_entry,
)
from hfjax.planner.programs.planned_run import PlannedRun
from hfjax.planner.score import ScoredCandidate
from hfjax.trainer import config_io
from hfjax.trainer.build import check_flags_used
from hfjax.trainer.config import TrainConfig
from hfjax.utils.atomic import replace_text
from hfjax.utils.command_errors import report_errors, run_command
from hfjax.utils.paths import nest
from hfjax.utils.progress import show_progress
from hfjax.utils.tables import human, parse_bytes, quote


@dataclass(frozen=True)
class PlanReport:
    """A plan and what it was made with."""

    plan: StepPlan
    settings: PlanSettings
    notes: tuple[str, ...] = ()
    compared: str = ""  # what describes the compared layout: flags, or a file
    query: tuple[tuple[str, Any], ...] = ()
    answer: Answer | None = None

    @property
    def why_not(self) -> str | None:
        """The reason why nothing is compiled."""
        return why_not_compiled(self.plan.machine.key)

    @property
    def compile(self) -> int:
        """The number of entries to compile."""
        return self.settings.compile


def main(argv: Sequence[str]) -> int:
    """Run `hfjax plan` with these arguments; return the exit status."""
    with report_errors("plan"):
        default, rest = config_of(argv)
        check_flags(rest)
        check_no_deepspeed(default, rest)
        settings: PlanSettings = parse_flags(
            PlanSettings, rest, "plan", plan_settings(default), config=True
        )
        check_flags_used([settings], run_flags(rest))
        if settings.model.pretrained is None:
            check_recipe(argv, settings, settings.vocab)
    if settings.calibrate is not None:
        return run_command("plan", lambda: _calibrate(settings.count))
    console = Console(highlight=False)
    return run_command("plan", lambda: _run_plan(settings, default, rest, console))


def _calibrate(count: int) -> None:
    """Measure and keep the constants of this machine; of a CPU, with `count` simulated devices."""
    _set_cpu_devices(count)
    path = calibration_path(jax.devices()[0].device_kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    calibrate(path, _say)
    print("hfjax plan --gpu here takes it.")


def _set_cpu_devices(count: int) -> None:
    with suppress(RuntimeError):  # JAX is running already: its devices stay
        jax.config.update("jax_num_cpu_devices", count)


def _say(message: object) -> None:
    print(message, file=sys.stderr, flush=True)


def _run_plan(
    settings: PlanSettings, default: TrainConfig, argv: Sequence[str], console: Console
) -> None:
    constants = constants_of(settings.gpu)
    check_whole_nodes(constants.machine, settings.count)
    layout_label, query = find_query(settings, argv)
    _configure_jax()
    report = build_plan(settings, default, constants, _say)
    if query:
        with show_progress("looking for the layout to compare"):
            answer = find_answer(report.plan, query, _say)
        report = replace(report, compared=layout_label, query=tuple(query.items()), answer=answer)
    _show(report, console)
    _write_files(report, console)


def find_query(settings: PlanSettings, argv: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return what describes the layout to compare, and the fields that it fixes; {}: none."""
    if settings.compare is not None:
        config = _load_compared(settings.compare)
        try:
            return str(settings.compare), full_query(config, settings.count)
        except ValueError as wrong:
            raise ValueError(f"--compare {quote(settings.compare)}: {wrong}") from None
    flags = layout_flags(argv)
    return " ".join(flags.values()), query_of(settings, list(flags), settings.count)


def _load_compared(path: Path) -> TrainConfig:
    """Return the configuration of --compare; refuse one that a plan has no formula for."""
    config_io.check_file(path, "--compare")
    if path.suffix == ".py":
        config = config_io.load(path)
    else:
        settings = config_io.read_settings(path, "--compare")
        config = config_io.parse_dataclass(TrainConfig, settings, quote(path))
    check_compared(config, path)
    return config


def _configure_jax() -> None:
    """Set JAX up before its first use: a CPU stands in for all devices."""
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # of drivers that are not needed


def build_plan(
    settings: PlanSettings,
    default: TrainConfig,
    constants: Constants,
    log: Callable[[str], Any] = lambda message: None,
) -> PlanReport:
    """Return the plan of the settings.

    Args:
        settings: The settings.
        default: The configuration that they started from: that of --config.
        constants: The constants of the GPU.
        log: Called with progress messages.
    """
    run = PlannedRun(run_of(settings, default, 1), jax.devices()[:1], settings.vocab)
    batch_size = step_batch_size(settings, run.task.unit, run.task.units_per_example)
    config = run_of(settings, default, batch_size)
    memory = None if settings.device_memory is None else parse_bytes(settings.device_memory)
    target: dict[str, Any] = {
        "gpu": constants.machine,
        "count": settings.count,
        "vocab": settings.vocab,
    }
    target["memory"] = memory
    with show_progress(f"planning for {settings.count} x {constants.machine.name}"):
        options = CompileOptions(settings.compile, cache=settings.compilation_cache)
        plan = make_plan(config, **target, compile=options, tell=log)
    left = ignored_settings(default)
    notes = [f"searched anew, in place of what --config says: {', '.join(left)}"] if left else []
    return PlanReport(plan, settings, (*constants.notes, *notes))


# -- output ---------------------------------------------------------------------------------


def _show(report: PlanReport, console: Console) -> None:
    plan, settings = report.plan, report.settings
    lines = list(heading(plan, report))
    notes = [*notes_of(plan, settings), *report.notes]
    if report.answer is None:
        write(console, plan_table(plan, settings.top, lines, notes))
    else:
        group = layout_report(plan, report.answer, report.compared)
        write(console, Group(*heading_lines(lines), group, *note_lines(notes)))


def _write_files(report: PlanReport, console: Console) -> None:
    settings, plan = report.settings, report.plan
    entry = plan.best if report.answer is None else _answer_entry(report.answer, plan)
    if settings.json is not None:
        replace_text(settings.json, json.dumps(as_json(report), indent=1))
    if settings.picture is not None and entry is not None:
        draw_timeline.write(settings.picture, timeline(plan, entry))
        console.print(f"{settings.picture} is drawn.")
    if settings.plan is None and entry is not None:
        hint = "--plan plan.yaml writes it for hfjax train --config plan.yaml."
        console.print(("The first: " if report.answer is None else "This one: ") + hint)
    elif settings.plan is not None:
        if entry is None:
            raise ValueError(
                f"--plan {settings.plan}: {report.compared} does not run; none is written."
            )
        replace_text(settings.plan, as_yaml(plan, entry))
        console.print(f"{settings.plan} is written: hfjax train --config {settings.plan}")


def _answer_entry(answer: Answer, plan: StepPlan) -> PlanEntry | None:
    """Return the compared layout as an entry; None: it does not run."""
    s = answer.scored
    if s is None:
        return None
    matches = [r for r in (*plan.entries, *plan.others) if r.candidate == s.candidate]
    return matches[0] if matches else replace(plan_entry(s, s, plan), reason="compared")


def as_yaml(plan: StepPlan, entry: PlanEntry) -> str:
    """Return the settings of an entry for `hfjax train --config`: those that are not defaults."""
    config = config_io.with_absolute_paths(plan.settings(entry))
    plain = lambda x: str(x) if isinstance(x, Path) else list(x) if isinstance(x, tuple) else x
    changed = {
        name.replace(".", "/"): plain(x) for name, x in config_io.changed_fields(config).items()
    }
    ms, peak = 1000 * entry.time.total, human(entry.peak.total)
    head = (
        f"# hfjax plan: {entry.candidate}\n# on {plan.count} x {plan.machine.name}: {ms:,.1f} ms a "
        f"step and {peak} of a GPU are predicted\n"
    )
    return head + yaml.safe_dump(nest(changed), sort_keys=False)


def as_json(report: PlanReport) -> dict[str, Any]:
    """Return all numbers of a plan."""
    plan, task = report.plan, report.plan.scorer.base_run.task
    entries = [_entry_numbers(plan, entry) for entry in plan.entries]
    others = [_entry_numbers(plan, entry) for entry in plan.others]
    document: dict[str, Any] = {
        "model": task.model.name,
        "gpu": plan.machine.name,
        "count": plan.count,
        "memory": plan.memory,
        "global_batch_size": plan.config.global_batch_size,
        "unit": task.unit,
        "each": task.units_per_example,
        "searched": plan.searched,
        "refused": plan.refused,
        "seconds": plan.seconds,
        "notes": [*plan.notes, *report.notes],
        "entries": entries,
        "others": others,
    }
    if report.answer is not None:
        entry = _answer_entry(report.answer, plan)
        document["compared"] = {
            "layout": report.compared,
            "fields": dict(report.query),
            "refusal": report.answer.refusal,
            "entry": None if entry is None else _entry_numbers(plan, entry),
        }
    return document


def _entry_numbers(plan: StepPlan, entry: PlanEntry) -> dict[str, Any]:
    scored = ScoredCandidate(entry.candidate, entry.time, entry.peak)
    return {
        "settings": {
            k: _plain(v) for k, v in config_io.changed_fields(plan.settings(entry)).items()
        },
        "shown": dict(entry.candidate.table_cells),
        "seconds": {**entry.time.parts, "total": entry.time.total},
        "bytes": {**entry.peak.parts, "total": entry.peak.total},
        "compiled": entry.compiled is not None,
        "transfers": transfer_totals(plan, scored),
        "tokens_per_second_of_a_gpu": entry.tokens,
        "mfu": entry.mfu,
        "fits": entry.fits,
        "reason": entry.reason,
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else str(value)
