"""The table of `hfjax memory`: a column for each alternative."""

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from hfjax.planner.programs.estimate import Estimate
from hfjax.utils.tables import human


@dataclass(frozen=True)
class Report:
    """The results of `hfjax memory`: an estimate per alternative, the chosen settings first."""

    title: str
    estimates: tuple[Estimate, ...]
    refused: dict[str, str]  # alternative -> why it is refused
    memory: int | None  # of a device
    device: str  # the device with that memory
    notes: tuple[str, ...]
    missed: str | None = None  # what was asked for but is not possible: no offload fits


# section -> entries: label, and the field of an Estimate (* leaves out entries that are all 0)
SECTIONS: dict[str, dict[str, str]] = {
    "from the layout": {
        "parameters": "parameters",
        "gradients": "gradients",
        "optimizer state": "optimizer_state",
        "master weights": "master*",
    },
    "from the trace": {
        "kept by layers": "layers",
        "kept around the layers": "ends",
        "messages between stages": "messages*",
    },
    "from the compiler": {
        "arguments": "arguments",
        "temporaries": "temporaries",
        "peak": "peak",
    },
    "on the host, per device": {
        "parameters ": "host_parameters*",
        "optimizer state ": "host_optimizer_state*",
        "master weights ": "host_master*",
        "stashes": "host_stashes*",
        "as compiled": "host_compiled*",
    },
    "sent in a step": {"to the host": "to_host*", "from the host": "to_device*"},
}


def table(report: Report) -> Group:
    """Return the table, with its title above and refused alternatives below."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    grid.add_column("bytes per device", no_wrap=True)
    for number, estimate in enumerate(report.estimates):
        style = "bold" if number == 0 else ""
        grid.add_column(estimate.heading, justify="right", style=style, no_wrap=True)
    for section, labels in SECTIONS.items():
        _add_section(grid, section, labels, report)
    if report.memory is not None:
        _add_verdict(grid, report.memory, report)
    lines: list[Any] = [Text(report.title, style="bold"), Text(), grid]
    refused = [Text(f"{name}: {why}", style="red") for name, why in report.refused.items()]
    return Group(*lines, *refused)


def _add_section(grid: Table, section: str, labels: dict[str, str], report: Report) -> None:
    columns = report.estimates
    visible = {
        label: name.rstrip("*")
        for label, name in labels.items()
        if not name.endswith("*") or any(getattr(e, name[:-1]) for e in columns)
    }
    if not visible:
        return
    grid.add_row(Text(section, style="italic cyan"))
    for number, (label, name) in enumerate(visible.items()):
        cells = [_cell(e, name) for e in columns]
        grid.add_row(f"  {label}", *cells, end_section=number == len(visible) - 1)


def _cell(estimate: Estimate, name: str) -> str:
    size = getattr(estimate, name)
    return "?" if size is None else human(size)


def _add_verdict(grid: Table, memory: int, report: Report) -> None:
    """Add the peak as a fraction of the device's memory."""
    cells = []
    for estimate in report.estimates:
        fraction = estimate.peak / memory
        colour = "green" if fraction < 0.9 else "yellow" if fraction <= 1 else "red"
        cells.append(Text(f"{fraction:.1%}", style=colour))
    grid.add_row(f"peak of {human(memory)}", *cells)
