"""Checks compiled pipelines: a permute in a branch that one stage takes waits forever."""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from hfjax.parallel.mesh import PIPE_AXIS, auto_axes

# A permute in a branch inside shard_map: the operation that needs it, and its stack frame.
_PERMUTE = re.compile(
    r'collective-permute(?:-start)?\(.*op_name="[^"]*\bshard_map/'
    r'[^"]*\bbranch_\d+_fun/[^"]*?(?P<op>[^/"]+)"(?:.*?stack_frame_id=(?P<frame>\d+))?'
)


def check_deadlock(jitted: Any, mesh: Mesh) -> Any:
    """Return a jitted function that checks each program before it runs, if the mesh needs that."""
    return (
        DeadlockChecked(jitted, mesh) if mesh.shape[PIPE_AXIS] > 1 and auto_axes(mesh) else jitted
    )


class DeadlockChecked:
    """A jitted function of a pipeline on a mesh where XLA's partitioner adds collectives."""

    def __init__(self, jitted: Any, mesh: Mesh) -> None:
        self.jitted, self.axes = jitted, auto_axes(mesh)
        self.checked_shapes: set[Any] = set()

    def __call__(self, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args[1:])  # the arguments after state or parameters
        shapes = tree, *((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)
        if shapes not in self.checked_shapes:
            # The call below finds this program in JAX's cache: it is compiled once.
            check_branches(self.jitted.lower(*args).compile().as_text(), self.axes)
            self.checked_shapes.add(shapes)
        return self.jitted(*args)

    @property
    def trace(self) -> Callable:
        return self.jitted.trace

    @property
    def lower(self) -> Callable:
        return self.jitted.lower


def check_branches(text: str, axes: tuple[str, ...]) -> None:
    """Refuse the text of a compiled pipeline that has a permute in a stage's branch."""
    match = _PERMUTE.search(text)
    if match is None:
        return
    raise ValueError(
        "this program may wait for ever. XLA has put a permute into a branch that not all stages "
        "take (one alone runs head and loss; or a lax.cond of the model), for "
        f"{match['op']!r}{_source_line(text, match['frame'])}: it waits for the devices of all "
        "stages. XLA needs it to cut, shift or pad a dimension that is split over "
        f"{', '.join(axes)}. Put the array together in the model, before and after: "
        "place(f(place(x, (None, …))), (None, …)), with a None for each dimension and place = "
        "self.place (docs/any_model.md); if the loss cuts it, where head returns it. Or leave that "
        "dimension of the parameter whole: give it a name that the strategy does not split."
    )


def _source_line(text: str, frame: str) -> str:
    """Return the source line of a frame, from the tables at the head of the program's text."""

    def look_up(table: str, key: str, number: str) -> str:
        block = re.search(rf"^{table}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
        match = re.search(rf"^{number} .*?{key}(\w+)", block[1], re.MULTILINE) if block else None
        return match[1] if match else ""

    location = look_up("StackFrames", "file_location_id=", frame)
    file, line = (look_up("FileLocations", key, location) for key in ("file_name_id=", "line="))
    name = re.search(rf'^FileNames\n(?:\d+ .*\n)*?{file} "(.*)"', text, re.MULTILINE)
    return f", in {name[1]}:{line}" if name else ""
