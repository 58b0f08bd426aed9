"""Check compiled pipelines: a permute in a branch that one stage takes waits for ever."""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from hfjax.parallel.mesh import PIPE_AXIS, partitioned

# A permute in a branch inside shard_map: the operation that needs it, and its stack frame.
_PERMUTE = re.compile(
    r'collective-permute(?:-start)?\(.*op_name="[^"]*\bshard_map/'
    r'[^"]*\bbranch_\d+_fun/[^"]*?(?P<op>[^/"]+)"(?:.*?stack_frame_id=(?P<frame>\d+))?'
)


def checked(jitted: Any, mesh: Mesh) -> Any:
    """Return a jitted function that checks each program before it runs, if the mesh needs that."""
    return Checked(jitted, mesh) if mesh.shape[PIPE_AXIS] > 1 and partitioned(mesh) else jitted


class Checked:
    """A jitted function of a pipeline on a mesh where XLA's partitioner adds collectives."""

    def __init__(self, jitted: Any, mesh: Mesh) -> None:
        self.jitted, self.axes = jitted, partitioned(mesh)
        self.seen: set[Any] = set()

    def __call__(self, *given: Any) -> Any:
        leaves, tree = jax.tree.flatten(given[1:])  # what comes beside the state or parameters
        of = tree, *((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)
        if of not in self.seen:
            # The call below finds this program where JAX keeps them: it is compiled once.
            check_branches(self.jitted.lower(*given).compile().as_text(), self.axes)
            self.seen.add(of)
        return self.jitted(*given)

    @property
    def trace(self) -> Callable:
        return self.jitted.trace

    @property
    def lower(self) -> Callable:
        return self.jitted.lower


def check_branches(text: str, axes: tuple[str, ...]) -> None:
    """Refuse the text of a compiled pipeline in which a permute lies in a stage's branch."""
    found = _PERMUTE.search(text)
    if found is None:
        return
    raise ValueError(
        "this program may wait for ever. XLA has put a permute into a branch that not all stages "
        f"take (one alone runs head and loss; or a lax.cond of the model), for {found['op']!r}"
        f"{_source(text, found['frame'])}: it waits for the devices of all stages. XLA needs it to "
        f"cut, shift or pad a dimension that is split over {', '.join(axes)}. Put the array "
        "together in the model, before and after: place(f(place(x, (None, …))), (None, …)), "
        "with a None for each dimension and place = self.place (docs/any_model.md); if the loss "
        "cuts it, where head returns it. Or leave that dimension of the parameter whole: give it a "
        "name that the strategy does not split."
    )


def _source(text: str, frame: str) -> str:
    """Return in which line a frame lies, by the tables at the head of the program's text."""

    def row(table: str, key: str, number: str) -> str:
        rows = re.search(rf"^{table}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
        found = re.search(rf"^{number} .*?{key}(\w+)", rows[1], re.MULTILINE) if rows else None
        return found[1] if found else ""

    location = row("StackFrames", "file_location_id=", frame)
    file, line = (row("FileLocations", key, location) for key in ("file_name_id=", "line="))
    name = re.search(rf'^FileNames\n(?:\d+ .*\n)*?{file} "(.*)"', text, re.MULTILINE)
    return f", in {name[1]}:{line}" if name else ""
