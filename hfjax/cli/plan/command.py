"""`hfjax plan`: how a step is laid out best on so many GPUs, before anything runs."""

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
from hfjax.cli.arguments import parsed
from hfjax.cli.plan.compare import Answer, answer, says_all, words_of
from hfjax.cli.plan.compare_table import told, transfers
from hfjax.cli.plan.hardware import (
    Constants,
    check_whole_nodes,
    constants_of,
    place_of,
    why_not_compiled,
)
from hfjax.cli.plan.settings import (
    PlanSettings,
    check_no_deepspeed,
    check_searched,
    not_taken,
    of_plan,
    rows_of,
    run_of,
)
from hfjax.cli.plan.table import headed, heading, noted, notes_of, shown, write
from hfjax.cli.plan.timeline import timeline
from hfjax.cli.run import config_of
from hfjax.planner.calibration.calibrate import calibrate
from hfjax.planner.make_plan import Compiling, PlanRow, StepPlan, make_plan, row_of, unsearched
from hfjax.planner.programs.planned_run import Planned
from hfjax.planner.score import Scored
from hfjax.trainer import config_io
from hfjax.trainer.build import check_used
from hfjax.trainer.config import Train
from hfjax.utils.atomic import replace_text
from hfjax.utils.command_errors import carried_out, ending_in_words
from hfjax.utils.paths import nest
from hfjax.utils.progress import said_while
from hfjax.utils.tables import bytes_of, human


@dataclass(frozen=True)
class MadePlan:
    """A plan and what it was made with."""

    plan: StepPlan
    given: PlanSettings
    notes: tuple[str, ...] = ()
    words: tuple[tuple[str, Any], ...] = ()  # of --why
    answer: Answer | None = None

    @property
    def why_not(self) -> str | None:
        """Why nothing is compiled."""
        return why_not_compiled(self.plan.machine.key)

    @property
    def compile(self) -> int:
        """How many rows were to be compiled."""
        return self.given.compile


def main(argv: Sequence[str]) -> int:
    """Run `hfjax plan` with these arguments; return the exit status."""
    with ending_in_words("plan"):
        default, rest = config_of(argv)
        check_searched(rest)
        check_no_deepspeed(default, rest)
        given: PlanSettings = parsed(PlanSettings, rest, "plan", of_plan(default), config=True)
        check_used([given], rest)
    if given.calibrate is not None:
        return carried_out("plan", lambda: _calibrate(given.count))
    console = Console(highlight=False)
    return carried_out("plan", lambda: _tell(given, default, console))


def _calibrate(count: int) -> None:
    """Measure the constants of this machine and keep them; of CPUs, of so many fake devices."""
    _have_devices(count)
    place = place_of(jax.devices()[0].device_kind)
    place.parent.mkdir(parents=True, exist_ok=True)
    calibrate(place, _say)
    print("hfjax plan --gpu here takes it.")


def _have_devices(count: int) -> None:
    with suppress(RuntimeError):  # JAX runs already: it has what it has
        jax.config.update("jax_num_cpu_devices", count)


def _say(words: object) -> None:
    print(words, file=sys.stderr, flush=True)


def _tell(given: PlanSettings, default: Train, console: Console) -> None:
    words = None if given.why is None else words_of(given.why, given.count)
    constants = constants_of(given.gpu)
    check_whole_nodes(constants.machine, given.count)
    _prepare()
    search = words is None or not says_all(words, given.count)
    made = planned(given, default, constants, _say, search)
    if words is not None:
        with said_while("looking for what --why says"):
            found = answer(made.plan, words, _say)
        made = replace(made, words=tuple(words.items()), answer=found)
    _show(made, console)
    _write(made, console)


def _prepare() -> None:
    """Set JAX up before its first use: a CPU stands in for all devices."""
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # of drivers that are not needed


def planned(
    given: PlanSettings,
    default: Train,
    constants: Constants,
    tell: Callable[[str], Any] = lambda words: None,
    search: bool = True,
) -> MadePlan:
    """Return the plan of the settings.

    Args:
        given: The settings.
        default: The configuration that they began with: that of --config.
        constants: The GPU's.
        tell: Called with words on what goes on.
        search: Whether anything is searched; else the plan has no rows.
    """
    one = Planned(run_of(given, default, 1), jax.devices()[:1], given.vocab)
    rows = rows_of(given, one.task.unit, one.task.each)
    config = run_of(given, default, rows)
    memory = None if given.device_memory is None else bytes_of(given.device_memory)
    of: dict[str, Any] = {"gpu": constants.machine, "count": given.count, "vocab": given.vocab}
    of["memory"] = memory
    if not search:
        return MadePlan(unsearched(config, **of), given, constants.notes)
    with said_while(f"planning for {given.count} x {constants.machine.name}"):
        compiling = Compiling(given.compile, cache=given.cache)
        plan = make_plan(config, **of, compile=compiling, tell=tell)
    left = not_taken(default)
    notes = [f"searched anew, in place of what --config says: {', '.join(left)}"] if left else []
    return MadePlan(plan, given, (*constants.notes, *notes))


# -- what is shown and written --------------------------------------------------------------


def _show(made: MadePlan, console: Console) -> None:
    plan, given = made.plan, made.given
    lines = list(heading(plan, made))
    notes = [*notes_of(plan, given), *made.notes]
    if made.answer is None:
        write(console, shown(plan, given.rows, lines, notes))
    else:
        assert given.why is not None
        group = told(plan, made.answer, given.why, dict(made.words))
        write(console, Group(*headed(lines), group, *noted(notes)))


def _write(made: MadePlan, console: Console) -> None:
    given, plan = made.given, made.plan
    row = plan.best if made.answer is None else _row_of(made.answer, plan)
    if given.json is not None:
        replace_text(given.json, json.dumps(as_json(made), indent=1))
    if given.picture is not None and row is not None:
        draw_timeline.write(given.picture, timeline(plan, row))
        console.print(f"{given.picture} is drawn.")
    if given.out is None and row is not None:
        words = "--out plan.yaml writes it for hfjax train --config plan.yaml."
        console.print(("The first: " if made.answer is None else "This one: ") + words)
    elif given.out is not None:
        if row is None:
            raise ValueError(f"--out {given.out}: what --why says does not run; none is written.")
        replace_text(given.out, as_yaml(plan, row))
        console.print(f"{given.out} is written: hfjax train --config {given.out}")


def _row_of(found: Answer, plan: StepPlan) -> PlanRow | None:
    """Return what --why found as a row; None: it does not run."""
    s = found.scored
    if s is None:
        return None
    same = [r for r in (*plan.rows, *plan.others) if r.candidate == s.candidate]
    return same[0] if same else replace(row_of(s, s, plan), reason="--why")


def as_yaml(plan: StepPlan, row: PlanRow) -> str:
    """Return the settings of a row as `hfjax train --config` takes them: what is not usual."""
    config = config_io.anywhere(plan.settings(row))
    plain = lambda x: str(x) if isinstance(x, Path) else list(x) if isinstance(x, tuple) else x
    changed = {name.replace(".", "/"): plain(x) for name, x in config_io.changed(config).items()}
    ms, peak = 1000 * row.time.total, human(row.peak.total)
    head = (
        f"# hfjax plan: {row.candidate}\n# on {plan.count} x {plan.machine.name}: {ms:,.1f} ms a "
        f"step and {peak} of a GPU are predicted\n"
    )
    return head + yaml.safe_dump(nest(changed), sort_keys=False)


def as_json(made: MadePlan) -> dict[str, Any]:
    """Return all numbers of a plan."""
    plan, task = made.plan, made.plan.scorer.one.task
    rows = [_numbers(plan, row) for row in plan.rows]
    others = [_numbers(plan, row) for row in plan.others]
    found: dict[str, Any] = {
        "model": task.model.name,
        "gpu": plan.machine.name,
        "count": plan.count,
        "memory": plan.memory,
        "rows_of_a_step": plan.config.batch,
        "unit": task.unit,
        "each": task.each,
        "searched": plan.searched,
        "refused": plan.refused,
        "seconds": plan.seconds,
        "notes": [*plan.notes, *made.notes],
        "rows": rows,
        "others": others,
    }
    if made.answer is not None:
        row = _row_of(made.answer, plan)
        found["why"] = {
            "words": dict(made.words),
            "refusal": made.answer.refusal,
            "row": None if row is None else _numbers(plan, row),
        }
    return found


def _numbers(plan: StepPlan, row: PlanRow) -> dict[str, Any]:
    scored = Scored(row.candidate, row.time, row.peak)
    return {
        "settings": {k: _plain(v) for k, v in config_io.changed(plan.settings(row)).items()},
        "shown": dict(row.candidate.shown),
        "seconds": {**row.time.parts, "total": row.time.total},
        "bytes": {**row.peak.parts, "total": row.peak.total},
        "compiled": row.compiled is not None,
        "transfers": transfers(plan, scored),
        "tokens_per_second_of_a_gpu": row.tokens,
        "mfu": row.mfu,
        "fits": row.fits,
        "reason": row.reason,
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else str(value)
