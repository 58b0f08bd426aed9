"""What goes together: `REFUSED` has a row for each pair of features that does not.

Everything else works: tests/test_combinations.py trains every pair. `check` makes the errors of
this table, `table` what docs/combinations.md prints.
"""

import string
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import jax.numpy as jnp

from hfjax.features import FEATURES, lineage, written
from hfjax.parallel.engine.blueprint import LAYERS
from hfjax.parallel.engine.parts import IN_A_LOOP, IN_A_PIPELINE, NO_STATISTICS
from hfjax.parallel.execution import Execution
from hfjax.parallel.mesh import platform_of
from hfjax.plan.check_layout import PACKED_TOGETHER
from hfjax.plan.layout import Layout


@dataclass(frozen=True)
class Refusal:
    """Why two features do not go together.

    Attributes:
        why: The reason.
        instead: What to do.
        only: The condition under which it is so, in words; other uses of both go together.
        holds: The condition.
        found: When it is found, where only a trial of the optimizer or the trace can tell. `check`
            leaves such a row to the code that finds it, which raises `error_of` the pair.
    """

    why: str
    instead: str
    only: str = ""
    holds: Callable[[Layout, Execution], bool] = field(default=lambda layout, execution: True)
    found: str = ""


def _in_pipeline(layout: Layout, execution: Execution) -> bool:
    return written("schedule", layout, execution) is not None


def _scatters_layers(layout: Layout, _: Execution) -> bool:
    placed = layout.placed.items()
    return any(p.split_dims("gradient") for path, p in placed if path.startswith(LAYERS))


def _names_update(_: Layout, execution: Execution) -> bool:
    return dict(execution.kernels.named).get("adamw_shard") == "pallas"


PARTS = "methods embed(batch) and head(x), and `layers`; and no forward= in the layout"
WAITS = 'Use a schedule that waits, for instance hfjax.Schedule("1f1b", …), or '
LEAVE = "leave optimizer_in_backward out."
ON_HOST = (
    "Leave that out, or keep parameters on the device: hfjax.HOST_OPTIMIZER takes most of what a "
    "state needs off it."
)
ELEMENTWISE = "Use an optimizer that works element by element (optax.sgd, adam, adamw, lion …), or "
TRIED, TRACED = "as the step is made: it is tried out", "as the step is traced"
BY_STAGE = Refusal("stages keep versions of whole layers", f"{WAITS}hfjax.PIPE | hfjax.DDP.")
SCATTERED = Refusal(
    "the gradients of layers are scattered layer by layer, and in a tick some stages recompute, "
    "others do not",
    'Use hfjax.ZERO1, which scatters at the end, or remat="full" or "none".',
    holds=_scatters_layers,
)
UNSEEN = Refusal(
    "shards are not updated in one pass there, and the kernel would never run",
    'Leave "adamw_shard" out of the kernels.',
    only='if kernels says {"adamw_shard": "pallas"}',
    holds=_names_update,
)

REFUSED: dict[tuple[str, str], Refusal] = {
    # a model that is called as it is
    ("schedule", "model called as it is"): Refusal(
        f"stages are made of a model in three parts: {PARTS}", "docs/any_model.md shows one."
    ),
    ("remat", "model called as it is"): Refusal(
        "remat is of layers, and this model does not run in three parts (embed, layers, head)",
        "Give it these (docs/any_model.md), or use nnx.remat in the model.",
    ),
    ("offload", "model called as it is"): Refusal(
        "it is of what layers keep, and this model does not run in three parts (embed, layers, "
        "head)",
        "Give it these, or wrap its blocks: hfjax.offload(block, ratio=0.3).",
    ),
    ("optimizer_in_backward", "model called as it is"): Refusal(
        f"the model is not in three parts: {PARTS} (docs/any_model.md)", f"Write it so, or {LEAVE}"
    ),
    # parameters on the host
    ("HOST_PARAMETERS", "schedule"): Refusal(
        "a pipeline keeps its stages' layers on the device", ON_HOST
    ),
    ("HOST_PARAMETERS", "offload"): Refusal(
        "layers then run in a loop of our own, forward and backward, in which nothing is offloaded",
        f"Use remat in place of offload. {ON_HOST}",
    ),
    ("HOST_PARAMETERS", "remat every, group"): Refusal(
        "that is of several layers at a time, and each is fetched by itself", ON_HOST
    ),
    ("HOST_PARAMETERS", "reshard_after_forward=False"): Refusal(
        "that keeps all layers on the device", ON_HOST
    ),
    # layers that are updated in the backward pass
    ("clip", "optimizer_in_backward"): Refusal(
        "clipping needs the norm of the whole gradient",
        "Clip element by element (optax.chain(optax.clip(…), …)) with clip=None (hfjax train: "
        f"--optimizer.clip None), or {LEAVE}",
    ),
    ("accumulate", "optimizer_in_backward"): Refusal(
        "that keeps the gradients of all layers until the last microbatch",
        f"Use accumulate=1 (remat saves memory too), or {LEAVE}",
    ),
    ("remat every, group", "optimizer_in_backward"): Refusal(
        "that is of several layers at a time, and here each is run by itself",
        f'Use remat="full", "dots" or names, or {LEAVE}',
    ),
    ("offload", "optimizer_in_backward"): Refusal(
        "layers then run in a loop of our own, forward and backward, in which nothing is offloaded",
        f"Use remat in place of offload, or {LEAVE}",
    ),
    ("schedule", "optimizer_in_backward"): Refusal(
        "a schedule runs backward passes of several microbatches, on stages",
        f"Leave the schedule out, or {LEAVE}",
    ),
    ("optimizer that mixes parameters", "optimizer_in_backward"): Refusal(
        "each layer is updated by itself, before all gradients are known",
        f"{ELEMENTWISE}{LEAVE}",
        found=TRIED,
    ),
    ("kernels", "optimizer_in_backward"): UNSEEN,
    # asynchronous schedules
    ("clip", "asynchronous schedule"): Refusal(
        "no stage knows the norm of the whole gradient",
        f"{WAITS}clip element by element: optax.chain(optax.clip(…), …).",
    ),
    ("accumulate", "asynchronous schedule"): Refusal(
        "such a schedule accumulates by itself, by microbatch or by group",
        f"{WAITS}raise microbatches.",
    ),
    ("reduction=hierarchical", "asynchronous schedule"): Refusal(
        "gradients are reduced at every update, in one level", f'{WAITS}reduction="flat".'
    ),
    ("freeze", "asynchronous schedule"): Refusal(
        "stages keep versions of all their parameters", f"{WAITS}freeze nothing."
    ),
    ("HOST_OPTIMIZER", "asynchronous schedule"): Refusal(
        "it keeps a part of the state on the host, and stages update their layers where they lie",
        f"{WAITS}leave the column `memory` out.",
    ),
    ("hfjax.master", "asynchronous schedule"): Refusal(
        "stages keep versions of the parameters, not of their master weights",
        f"{WAITS}the optimizer without it.",
    ),
    ("FSDP", "asynchronous schedule"): BY_STAGE,
    ("ZERO2", "asynchronous schedule"): BY_STAGE,
    ("ZERO1", "asynchronous schedule"): BY_STAGE,
    ("optimizer that mixes parameters", "asynchronous schedule"): Refusal(
        "each stage updates its layers by itself",
        f'{ELEMENTWISE}a schedule that waits, for instance hfjax.Schedule("1f1b", …).',
        found=TRIED,
    ),
    ("kernels", "asynchronous schedule"): UNSEEN,
    ("kernels", "HOST_OPTIMIZER"): UNSEEN,
    ("kernels", "HOST_PARAMETERS"): UNSEEN,
    # what is computed again, or waits on the host, in a pipeline
    ("optimizer that mixes parameters", "schedule"): Refusal(
        "it takes means over all layers, empty places among them (adafactor, block RMS)",
        "Choose stages and chunks that divide the layers, or an optimizer that works element by "
        "element (sgd, adam, adamw, lion, …).",
        only="if it does so, and layers do not divide by the stages",
        found=TRIED,
    ),
    ("remat every, group", "schedule"): Refusal(
        "in a pipeline each layer is computed again by itself",
        'Use remat="full", "dots", "none", "except_last" or names.',
    ),
    ("remat except_last", "schedule that splits B and W"): Refusal(
        "that schedule splits backward passes in two (B and W)",
        'Use a schedule that does not (gpipe, 1f1b, interleaved), or remat="full" or "none".',
    ),
    ("remat except_last", "TENSOR"): Refusal(
        "layers send over a tensor axis, and in a tick some stages recompute, others do not",
        'Use remat="full" or "none".',
    ),
    ("remat except_last", "ZERO2"): SCATTERED,
    ("remat except_last", "FSDP"): SCATTERED,
    ("offload", "schedule that branches"): Refusal(
        "XLA copies all that lies on the host in each tick in which stages go different ways",
        "Use a schedule that does not branch (1f1b, interleaved, gpipe, zb, v), or remat instead "
        "of offload.",
        only="on devices that are no CPUs",
        holds=lambda layout, _: platform_of(layout.mesh) != "cpu",
    ),
    # others
    ("offload", "reshard_after_forward=False"): Refusal(
        "the first frees device memory, the other fills it with gathered weights, which are never "
        "offloaded",
        "Leave one of them out.",
    ),
    ("list of layers", "TENSOR"): Refusal(
        "stages of a list of layers run different programs, in which the partitioner's "
        "collectives over tensor would wait for each other for ever",
        "Use tensor=1 (data, fsdp and pipe work), or one module of stacked layers.",
        only="in a pipeline",
        holds=_in_pipeline,
    ),
    ("list of layers", "freeze"): Refusal(
        *PACKED_TOGETHER, only="if what is frozen lies in the list", found="by freeze"
    ),
    ("list of layers", "optimizer that mixes parameters"): Refusal(
        "all parameters of a stage lie in one row",
        "Use an optimizer that works element by element (sgd, adam, adamw, lion, rmsprop …; "
        "clipping by global norm is right too); LAMB, LARS, Adafactor, Muon and masks that tell "
        "one layer's parameters from another's do not. Or make the layers equal and stack them, "
        "or use no pipeline.",
        only="in a pipeline",
        found=TRIED,
    ),
    ("precision", "TENSOR"): Refusal(
        "a reduction in bfloat16 beside a tensor axis crashes XLA's CPU compiler",
        "Reduce in float32 on CPU.",
        only="on a CPU, if precision has reduce=bfloat16",
        holds=lambda layout, execution: (
            platform_of(layout.mesh) == "cpu" and execution.precision.reduce == jnp.bfloat16
        ),
    ),
    ("statistics that a model writes", "schedule"): Refusal(
        IN_A_PIPELINE, NO_STATISTICS, found=TRACED
    ),
    ("statistics that a model writes", "optimizer_in_backward"): Refusal(
        IN_A_LOOP, NO_STATISTICS, found=TRACED
    ),
    ("statistics that a model writes", "HOST_PARAMETERS"): Refusal(
        IN_A_LOOP, NO_STATISTICS, found=TRACED
    ),
}


# -- errors -------------------------------------------------------------------------------------


def check(layout: Layout, execution: Execution) -> None:
    """Refuse a pair of features that does not go together, before anything is traced."""

    how = cache(lambda name: written(name, layout, execution))
    for pair, refusal in REFUSED.items():
        if not refusal.found and all(map(how, pair)) and refusal.holds(layout, execution):
            raise error_of(pair, *map(how, pair))


def error_of(pair: tuple[str, str], *written: str | None) -> ValueError:
    """Return the error of a refused pair, each as the user wrote it."""
    refusal = REFUSED[pair]
    return ValueError(f"{' with '.join(map(str, written))}: {refusal.why}. {refusal.instead}")


# -- the table ----------------------------------------------------------------------------------


def refusals(one: str, other: str) -> list[Refusal]:
    """Return why two features do not go together, those of all uses first."""
    pairs = [(a, b) for a in lineage(one) for b in lineage(other)]
    found = [REFUSED.get((a, b)) or REFUSED.get((b, a)) for a, b in pairs]
    return sorted(filter(None, found), key=lambda refusal: bool(refusal.only))


def exclude(one: str, other: str) -> bool:
    """Return whether two features are values of one setting, or one needs the other."""
    needs = one in lineage(other) or other in lineage(one)
    return needs or bool(FEATURES[one].execution.keys() & FEATURES[other].execution.keys())


def cell(one: str, other: str) -> str:
    """Return what the table says of two features.

    >>> cell("clip", "remat"), cell("clip", "optimizer_in_backward"), cell("offload", "FSDP")
    ('+', '-', '+')
    """
    if exclude(one, other):
        return "."
    found = refusals(one, other)
    return "+" if not found else "?" if found[0].only else "-"


def table() -> str:
    """Return which features go together, as text of at most 100 columns.

    Example:
        >>> from hfjax.combinations import table
        >>> print(table().splitlines()[-1])
        + works; - refused; ? refused under a condition; . one setting, or one needs the other
    """
    letters = string.ascii_letters[: len(FEATURES)]
    width = max(map(len, FEATURES))
    lines = [" ".join([" " * (width + 2), *letters])]
    for letter, name in zip(letters, FEATURES, strict=True):
        cells = " ".join(cell(name, other) for other in FEATURES)
        lines.append(f"{letter} {name:<{width}} {cells}")
    told = "+ works; - refused; ? refused under a condition; . one setting, or one needs the other"
    return "\n".join([*lines, told])


def reasons() -> str:
    """Return why the others do not, and what to do, as text of at most 100 columns.

    Example:
        >>> from hfjax.combinations import reasons
        >>> print(reasons().splitlines()[0])
        - schedule with model called as it is: stages are made of a model in three parts: methods
    """
    together: dict[Refusal, list[str]] = {}
    for (one, other), refusal in REFUSED.items():
        together.setdefault(refusal, []).append(f"{one} with {other}")
    return "\n".join(_reason(refusal, pairs) for refusal, pairs in together.items())


def _reason(refusal: Refusal, pairs: list[str]) -> str:
    only = f" ({refusal.only})" if refusal.only else ""
    found = f" Found {refusal.found}." if refusal.found else ""
    said = f"{'; '.join(pairs)}{only}: {refusal.why}. {refusal.instead}{found}"
    return textwrap.fill(said, 100, subsequent_indent="  ", initial_indent="- ")
