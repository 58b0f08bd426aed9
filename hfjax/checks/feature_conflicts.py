"""What goes together: `CONFLICTS` has an entry for each pair of features that does not.

Everything else works: tests/test_combinations.py trains every pair. `check_combinations` raises the
errors of this table, `table` returns what docs/combinations.md prints.
"""

import string
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import jax.numpy as jnp

from hfjax.checks.features import (
    FEATURES,
    NOT_ELEMENT_BY_ELEMENT,
    NOT_IN_PARTS,
    needed_features,
    user_text,
)
from hfjax.parallel.adapters.model_template import LAYERS
from hfjax.parallel.execution import Execution
from hfjax.parallel.layer_stack.batch_split import NO_CHUNK_STATISTICS, SOME_EXAMPLES
from hfjax.parallel.layer_stack.bound_model import IN_A_LOOP, IN_A_PIPELINE, NO_STATISTICS
from hfjax.parallel.mesh import platform_of
from hfjax.sharding.check_layout import PACKED_TOGETHER
from hfjax.sharding.layout import Layout


def _everywhere(layout: Layout, execution: Execution) -> bool:
    return True


@dataclass(frozen=True)
class Refusal:
    """Why two features do not go together.

    Attributes:
        why: The reason.
        instead: What to do.
        condition_text: Where the pair is refused ("if …"); elsewhere both go together.
        condition: The same as a function.
        detected_later: When it is detected, where only a trial of the optimizer or the trace can
            tell. `check_combinations` leaves such an entry to the code that detects it, which
            raises `error_of` the pair.
    """

    why: str
    instead: str
    condition_text: str = ""
    condition: Callable[[Layout, Execution], bool] = _everywhere
    detected_later: str = ""

    @property
    def is_unconditional(self) -> bool:
        """Whether the pair is refused whatever else a layout and an execution say."""
        condition_text = self.condition_text or self.detected_later
        return not condition_text and self.condition is _everywhere


def _in_pipeline(layout: Layout, execution: Execution) -> bool:
    return user_text("schedule", layout, execution) is not None


def _has_split_layer_gradients(layout: Layout, _: Execution) -> bool:
    param_specs = layout.param_specs.items()
    return any(p.split_dims("gradient") for path, p in param_specs if path.startswith(LAYERS))


PARTS = "methods embed(batch) and head(x), and `layers`; and no forward= in the layout"
WAITS = 'Use a synchronous schedule, for instance hfjax.Schedule("1f1b", …), or '
OR_LEAVE_IT_OUT = "or leave optimizer_in_backward out."
ON_HOST = (
    "or keep parameters on the device: hfjax.HOST_OPTIMIZER alone moves most of a state to the "
    "host."
)
OWN_LOOP = (
    "layers then run in hfjax's own loop over layers (parallel/layerwise), in which nothing is "
    "offloaded"
)
ELEMENT_BY_ELEMENT = (
    "Use an optimizer that works element by element (optax.sgd, adam, adamw, lion …), "
)
TRIED = "Detected when train_step is called, from the optimizer's own program."
TRACED = "Detected at the first call, while the step is traced."
BY_STAGE = Refusal("stages keep versions of whole layers", f"{WAITS}hfjax.PIPE | hfjax.DDP.")
GRADIENTS_SCATTERED_PER_LAYER = Refusal(
    "the gradients of layers are scattered layer by layer, and in a tick some stages recompute, "
    "others do not",
    'Use hfjax.ZERO1, which scatters at the end, or remat="full" or "none".',
    condition=_has_split_layer_gradients,
)
HOST_COPIED = Refusal(
    "XLA copies everything that lies on the host in each tick in which stages branch",
    "Use a schedule that does not branch (1f1b, interleaved, gpipe, zb, v, without branches=True), "
    "or remat instead of offload.",
    condition_text="on devices other than CPUs",
    condition=lambda layout, _: platform_of(layout.mesh) != "cpu",
)
MAY_PERMUTE = Refusal(
    "what layers send over this axis may be a permute, which waits for the devices of all stages, "
    "and stages that skip their layers would let the others wait for ever",
    'Use branches="auto" or branches=False, by which no stage skips them here.',
)
LAYER_BY_LAYER = Refusal(
    "layers then run in hfjax's own loop over layers (parallel/layerwise), each on all examples",
    "Leave tensor_overlap_chunks out.",
)

CONFLICTS: dict[tuple[str, str], Refusal] = {
    # a whole model: hfjax runs no layers of it
    ("schedule", NOT_IN_PARTS): Refusal(
        f"stages are made of a model in three parts: {PARTS}", "docs/any_model.md shows one."
    ),
    ("remat", NOT_IN_PARTS): Refusal(
        "remat recomputes layers, and this model does not run in three parts (embed, layers, head)",
        "Give the model these (docs/any_model.md), or use nnx.remat in the model.",
    ),
    ("offload", NOT_IN_PARTS): Refusal(
        "offload moves what layers keep for the backward pass, and this model does not run in "
        "three parts (embed, layers, head)",
        "Give the model these, or wrap its blocks: hfjax.offload(block, ratio=0.3).",
    ),
    ("optimizer_in_backward", NOT_IN_PARTS): Refusal(
        f"the model is not in three parts: {PARTS} (docs/any_model.md)",
        f"Write the model in three parts, {OR_LEAVE_IT_OUT}",
    ),
    ("tensor_overlap_chunks", NOT_IN_PARTS): Refusal(
        "tensor_overlap_chunks splits what goes from layer to layer, and this model does not run "
        "in three parts (embed, layers, head)",
        "Give the model these (docs/any_model.md).",
    ),
    # layers that run on chunks of the batch
    ("tensor_overlap_chunks", "schedule"): Refusal(
        "the microbatches of a pipeline are such parts already", "Leave tensor_overlap_chunks out."
    ),
    ("tensor_overlap_chunks", "optimizer_in_backward"): LAYER_BY_LAYER,
    ("tensor_overlap_chunks", "HOST_PARAMETERS"): LAYER_BY_LAYER,
    ("tensor_overlap_chunks", "statistics that a model writes"): Refusal(
        SOME_EXAMPLES, NO_CHUNK_STATISTICS, detected_later=TRACED
    ),
    # parameters in host memory
    ("HOST_PARAMETERS", "schedule"): Refusal(
        "a pipeline keeps its stages' layers on the device",
        f"Set pipe=1 and leave the schedule out, {ON_HOST}",
    ),
    ("HOST_PARAMETERS", "offload"): Refusal(
        OWN_LOOP,
        f"Use remat in place of offload, {ON_HOST}",
    ),
    ("HOST_PARAMETERS", "remat every, group"): Refusal(
        "such a remat recomputes several layers together, and with HOST_PARAMETERS each is "
        "fetched by itself",
        f'Use remat="full", "dots" or names, {ON_HOST}',
    ),
    ("HOST_PARAMETERS", "reshard_after_forward=False"): Refusal(
        "reshard_after_forward=False keeps all layers on the device",
        f"Leave reshard_after_forward=False out, {ON_HOST}",
    ),
    # layers that are updated in the backward pass
    ("max_grad_norm", "optimizer_in_backward"): Refusal(
        "clipping needs the norm of the whole gradient",
        "Clip element by element (optax.chain(optax.clip(…), …)) with max_grad_norm=None "
        f"(hfjax train: --optimizer.max-grad-norm None), {OR_LEAVE_IT_OUT}",
    ),
    ("gradient_accumulation_steps", "optimizer_in_backward"): Refusal(
        "accumulation keeps the gradients of all layers until the last microbatch",
        f"Use gradient_accumulation_steps=1 (remat saves memory too), {OR_LEAVE_IT_OUT}",
    ),
    ("remat every, group", "optimizer_in_backward"): Refusal(
        "such a remat recomputes several layers together, and with optimizer_in_backward each "
        "runs by itself",
        f'Use remat="full", "dots" or names, {OR_LEAVE_IT_OUT}',
    ),
    ("offload", "optimizer_in_backward"): Refusal(
        OWN_LOOP,
        f"Use remat in place of offload, {OR_LEAVE_IT_OUT}",
    ),
    ("schedule", "optimizer_in_backward"): Refusal(
        "a schedule runs backward passes of several microbatches, on stages",
        f"Leave the schedule out, {OR_LEAVE_IT_OUT}",
    ),
    (NOT_ELEMENT_BY_ELEMENT, "optimizer_in_backward"): Refusal(
        "each layer is updated by itself, before all gradients are known",
        f"{ELEMENT_BY_ELEMENT}{OR_LEAVE_IT_OUT}",
        detected_later=TRIED,
    ),
    ("loss scale", "optimizer_in_backward"): Refusal(
        "layers are updated before it is known whether a gradient overflows",
        f'Use precision="bf16", which needs no scale, {OR_LEAVE_IT_OUT}',
    ),
    # asynchronous schedules
    ("loss scale", "asynchronous schedule"): Refusal(
        "stages update their layers before it is known whether a gradient overflows",
        f'{WAITS}precision="bf16", which needs no scale.',
    ),
    ("max_grad_norm", "asynchronous schedule"): Refusal(
        "no stage knows the norm of the whole gradient",
        f"{WAITS}clip element by element: optax.chain(optax.clip(…), …).",
    ),
    ("gradient_accumulation_steps", "asynchronous schedule"): Refusal(
        "an asynchronous schedule accumulates by itself, by microbatch or by group",
        f"{WAITS}raise microbatches.",
    ),
    ("gradient_reduction=hierarchical", "asynchronous schedule"): Refusal(
        "gradients are reduced at every update, in one level", f'{WAITS}gradient_reduction="flat".'
    ),
    ("freeze", "asynchronous schedule"): Refusal(
        "stages keep versions of all their parameters", f"{WAITS}freeze nothing."
    ),
    ("HOST_OPTIMIZER", "asynchronous schedule"): Refusal(
        "HOST_OPTIMIZER keeps a part of the state on the host, and stages update their layers "
        "where these lie",
        f"{WAITS}leave the column `memory` out.",
    ),
    ("hfjax.optimizers.master_weights", "asynchronous schedule"): Refusal(
        "stages keep versions of the parameters, not of their master weights",
        f"{WAITS}the optimizer without hfjax.optimizers.master_weights.",
    ),
    ("FSDP", "asynchronous schedule"): BY_STAGE,
    ("asynchronous schedule", "EXPERT"): BY_STAGE,
    ("GRID", "asynchronous schedule"): BY_STAGE,
    ("ZERO2", "asynchronous schedule"): BY_STAGE,
    ("ZERO1", "asynchronous schedule"): BY_STAGE,
    (NOT_ELEMENT_BY_ELEMENT, "asynchronous schedule"): Refusal(
        "each stage updates its layers by itself",
        f'{ELEMENT_BY_ELEMENT}or a synchronous schedule, for instance hfjax.Schedule("1f1b", …).',
        detected_later=TRIED,
    ),
    # recomputation and host memory in a pipeline
    (NOT_ELEMENT_BY_ELEMENT, "schedule"): Refusal(
        "what the optimizer computes of all layers together (means, sorts) would include padding",
        "Choose stages and chunks that divide the number of layers, or an optimizer that works "
        "element by element (sgd, adam, adamw, lion, …).",
        condition_text="if empty places change what the optimizer computes, and the stages do not "
        "divide the number of layers",
        detected_later=TRIED,
    ),
    ("remat every, group", "schedule"): Refusal(
        "in a pipeline each layer is recomputed by itself",
        'Use remat="full", "dots", "none", "except_last" or names.',
    ),
    ("remat except_last", "schedule that splits B and W"): Refusal(
        "such a schedule splits backward passes in two (B and W)",
        'Use a schedule that does not split them (gpipe, 1f1b, interleaved), or remat="full" or '
        '"none".',
    ),
    ("remat except_last", "TENSOR"): Refusal(
        "layers send over a tensor axis, and in a tick some stages recompute, others do not",
        'Use remat="full" or "none".',
    ),
    ("remat except_last", "ZERO2"): GRADIENTS_SCATTERED_PER_LAYER,
    ("remat except_last", "FSDP"): GRADIENTS_SCATTERED_PER_LAYER,
    ("offload", "schedule that branches"): HOST_COPIED,
    ("offload", "branches=True"): HOST_COPIED,
    ("branches=True", "TENSOR"): MAY_PERMUTE,
    ("branches=True", "GRID"): MAY_PERMUTE,
    ("branches=True", "EXPERT"): MAY_PERMUTE,
    ("branches=True", "CONTEXT"): MAY_PERMUTE,
    # others
    ("offload", "reshard_after_forward=False"): Refusal(
        "offload frees device memory, and reshard_after_forward=False fills it with gathered "
        "weights, which are never offloaded",
        "Leave one of them out.",
    ),
    ("list of layers", "TENSOR"): Refusal(
        "stages of a list of layers run different programs, in which the partitioner's "
        "collectives over tensor would wait for each other for ever",
        "Use tensor=1 (data, fsdp and pipe work), or one module of stacked layers.",
        condition_text="in a pipeline",
        condition=_in_pipeline,
    ),
    ("EXPERT", "list of layers"): Refusal(
        "the stages of a list of layers hold all parameters of theirs packed into one row, from "
        "which none can stay split over expert",
        "Use expert=1 (data and fsdp work), or one module of stacked layers, or no pipeline.",
        condition_text="in a pipeline",
        condition=_in_pipeline,
    ),
    ("list of layers", "GRID"): Refusal(
        "a pipeline packs the layers of a list as they are on one device, and on a grid each "
        "device has a part of them",
        "Use row=1 and tensor=1 (data, fsdp and pipe work), or one module of stacked layers.",
        condition_text="in a pipeline",
        condition=_in_pipeline,
    ),
    ("list of layers", "freeze"): Refusal(
        *PACKED_TOGETHER,
        condition_text="in a pipeline, if frozen parameters are in the list",
        detected_later="Detected when freeze is called, or when train_step is called.",
    ),
    ("list of layers", NOT_ELEMENT_BY_ELEMENT): Refusal(
        "all parameters of a stage are packed into one row",
        "Use an optimizer that works element by element (sgd, adam, adamw, lion, rmsprop …; "
        "clipping by global norm works too). LAMB, LARS, Adafactor, Muon and masks that select "
        "some layers do not. Or make the layers equal and stack them, or use no pipeline.",
        condition_text="in a pipeline",
        detected_later=TRIED,
    ),
    ("precision", "TENSOR"): Refusal(
        "a reduction in bfloat16 beside a tensor axis crashes XLA's CPU compiler",
        "Reduce in float32 on CPU.",
        condition_text="on a CPU, if precision has reduce=bfloat16",
        condition=lambda layout, execution: (
            platform_of(layout.mesh) == "cpu" and execution.precision.reduce == jnp.bfloat16
        ),
    ),
    ("kernels", "GRID"): Refusal(
        "linear maps, attention and the loss are written for a grid "
        "(parallel/extensions/tensor_grid/ops.py), and no kernel has a part in them",
        "Leave kernels out.",
    ),
    ("CONTEXT", "GRID"): Refusal(
        "both split the sequence, and attention on a grid has whole rows",
        "Use hfjax.CONTEXT with hfjax.TENSOR, or a grid without hfjax.CONTEXT.",
    ),
    ("EXPERT", "GRID"): Refusal(
        "routers, and the experts that tokens travel to, need the whole width of a token, and on a "
        "grid each device has a part of it",
        "Use hfjax.EXPERT with hfjax.TENSOR, or a grid and models without mixtures.",
    ),
    ("statistics that a model writes", "schedule"): Refusal(
        IN_A_PIPELINE, NO_STATISTICS, detected_later=TRACED
    ),
    ("statistics that a model writes", "optimizer_in_backward"): Refusal(
        IN_A_LOOP, NO_STATISTICS, detected_later=TRACED
    ),
    ("statistics that a model writes", "HOST_PARAMETERS"): Refusal(
        IN_A_LOOP, NO_STATISTICS, detected_later=TRACED
    ),
}


# -- errors -------------------------------------------------------------------------------------


def check_combinations(layout: Layout, execution: Execution) -> None:
    """Refuse a pair of features that does not go together, before anything is traced."""

    text_of = cache(lambda name: user_text(name, layout, execution))
    for pair, refusal in CONFLICTS.items():
        if refusal.detected_later:
            continue
        if all(map(text_of, pair)) and refusal.condition(layout, execution):
            raise error_of(pair, *map(text_of, pair))


def error_of(pair: tuple[str, str], *written: str | None) -> ValueError:
    """Return the error of a refused pair, each as the user wrote it."""
    refusal = CONFLICTS[pair]
    return ValueError(f"{' with '.join(map(str, written))}: {refusal.why}. {refusal.instead}")


# -- the table ----------------------------------------------------------------------------------


def refusals(one: str, other: str) -> list[Refusal]:
    """Return why two features do not go together, unconditional refusals first."""
    pairs = [(a, b) for a in needed_features(one) for b in needed_features(other)]
    matches = [CONFLICTS.get((a, b)) or CONFLICTS.get((b, a)) for a, b in pairs]
    return sorted(filter(None, matches), key=lambda refusal: bool(refusal.condition_text))


def are_exclusive(one: str, other: str) -> bool:
    """Return whether two features are values of one setting, or one needs the other."""
    is_needed = one in needed_features(other) or other in needed_features(one)
    return is_needed or bool(FEATURES[one].execution.keys() & FEATURES[other].execution.keys())


def cell(one: str, other: str) -> str:
    """Return what the table says about two features.

    >>> [cell("max_grad_norm", name) for name in ("remat", "optimizer_in_backward")]
    ['+', '-']
    """
    if are_exclusive(one, other):
        return "."
    refused = refusals(one, other)
    return "+" if not refused else "?" if refused[0].condition_text else "-"


def table() -> str:
    """Return which features go together, as text of at most 100 columns.

    Example:
        >>> from hfjax.checks.feature_conflicts import table
        >>> print(table().splitlines()[-1])
        + works; - refused; ? refused under a condition; . same setting, or one needs the other
    """
    letters = string.ascii_letters[: len(FEATURES)]
    width = 24  # longer names continue on a second line
    lines = [" ".join([" " * (width + 2), *letters])]
    for letter, name in zip(letters, FEATURES, strict=True):
        cells = " ".join(cell(name, other) for other in FEATURES)
        first, *rest = textwrap.wrap(name, width)
        lines += [f"{letter} {first:<{width}} {cells}", *(f"  {more}" for more in rest)]
    legend = (
        "+ works; - refused; ? refused under a condition; . same setting, or one needs the other"
    )
    return "\n".join([*lines, legend])


def exclusions() -> str:
    """Return what each feature does not go with, a line for each, of at most 100 columns.

    Example:
        >>> from hfjax.checks.feature_conflicts import exclusions
        >>> print(exclusions().splitlines()[1])
        - max_grad_norm: refused with optimizer_in_backward; asynchronous schedule.
    """
    return "\n".join(map(_exclusion, FEATURES))


def _exclusion(name: str) -> str:
    features_with = lambda mark: "; ".join(other for other in FEATURES if cell(name, other) == mark)
    phrases = {"-": "refused with", "?": "in some cases refused with"}
    parts = [
        f"{phrase} {features_with(mark)}" for mark, phrase in phrases.items() if features_with(mark)
    ]
    return _list_item(f"{name}: {'. Also '.join(parts) or 'goes with everything'}.")


def reasons() -> str:
    """Return why the others do not, and what to do, as text of at most 100 columns.

    Example:
        >>> from hfjax.checks.feature_conflicts import reasons
        >>> print(reasons().split(": ")[0])
        - schedule with model not in three parts
    """
    pairs_by_refusal: dict[Refusal, list[str]] = {}
    for (one, other), refusal in CONFLICTS.items():
        pairs_by_refusal.setdefault(refusal, []).append(f"{one} with {other}")
    return "\n".join(_reason(refusal, pairs) for refusal, pairs in pairs_by_refusal.items())


def _reason(refusal: Refusal, pairs: list[str]) -> str:
    condition = f" (only {refusal.condition_text})" if refusal.condition_text else ""
    text = (
        f"{'; '.join(pairs)}{condition}: {refusal.why}. {refusal.instead} {refusal.detected_later}"
    )
    return _list_item(text)


def _list_item(text: str) -> str:
    return textwrap.fill(text, 100, subsequent_indent="  ", initial_indent="- ")
