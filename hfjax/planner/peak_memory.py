"""The peak memory of a step by formula: what a device holds at the points when it holds most.

    state        exact, from the layout
    gradients    accumulated, as the layout shards them
    kept         residuals of layers: of one microbatch, or of all that a stage holds
    weights      gathered or cast: what layers in flight, or all layers, hold beside the state
    moment       what else is live while the head or a layer runs

The largest of these points counts: at the head all residuals are live and no gradient is; when the
first layer runs backward, all gradients are. A program compiled for a GPU is the reference:
benchmarks/planner_memory.py compares 46, and `SPARE` covers what XLA's buffer assignment costs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial

from hfjax.planner.programs.model_profile import Sizes
from hfjax.planner.programs.program_costs import max_bytes

SPARE = 0.06  # of temporaries: gaps between buffers, and copies that no formula knows
SPARE_OF_LISTS = 0.3  # of models without a layer stack: all is read as one program
SPARE_OF_TENSOR = 0.09  # the same of programs that the partitioner shards
LOGITS_GRADIENT = 0.5  # of the logits: their gradient takes their buffer, and not always all of it
LOOPED = 1.2  # what a loop stacks besides x: XLA keeps some of it before it is cast, or unsharded
IN_FLIGHT = 2  # layers whose gathered or cast weights are live at once


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of parameters on a device."""

    layer: float  # one layer's, gathered, in the compute dtype
    layer_stored: float  # one layer's, as stored, sharded
    transposed: float  # of stored layers, what a loop keeps with another order of dimensions
    ends: float  # embedding and head, gathered, in the compute dtype
    gradient_layer: float  # the gradient of one layer as computed, before it is reduce-scattered
    gradient_ends: float  # of embedding and head, while replicated; else 0
    largest: float  # of the gradients of one layer, the largest array
    gradient_head: float  # of `gradient_ends`, the largest array


@dataclass(frozen=True)
class Peak:
    """Bytes of one device at the peak, by kind."""

    state: float
    batch: float
    gradients: float
    kept: float
    weights: float
    moment: float
    messages: float
    spare: float
    moment_kind: str = ""  # the peak is: of logits, of a layer, of gradients of embedding and head

    @property
    def total(self) -> float:
        """The sum of all parts."""
        first = self.state + self.batch + self.gradients + self.kept
        return first + self.weights + self.moment + self.messages + self.spare

    @property
    def parts(self) -> Mapping[str, float]:
        """The parts by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "moment_kind"}


@dataclass(frozen=True)
class MemoryInputs:
    """How a step runs, as far as memory depends on it."""

    microbatch_size: float  # examples on a device; a shared example counts in part
    layers: int  # of a stage
    layer_mode: str  # unrolled, in turn, loop
    gathers_params: bool  # parameters of layers are sharded over batch axes
    gradient_accumulation_steps: int = 1
    # Of a pipeline: the most microbatches that a stage stashes, in whole stages.
    stash_depth: float = 0.0
    stages: int = 1
    crossing: float = 0.0  # microbatches that wait for their weight gradients, in whole stages
    offload_ratio: float = 0.0  # fraction of the layers' residuals that waits in host memory
    tensor: int = 1
    has_layer_stack: bool = True  # equal layers are known; else all is one program


def peak_of(
    sizes: Sizes,
    run: MemoryInputs,
    state: float,
    gradients: float,
    batch: float,
    weights: WeightBytes,
) -> Peak:
    """Return the peak of a step."""
    list_moments = _pipeline_moments if run.stages > 1 else _layer_moments
    peak = max(list_moments(sizes, run, gradients, weights), key=lambda m: sum(m[:-1]))
    gradient_bytes, residuals, weight_bytes, moment, messages, moment_kind = peak
    spare = SPARE_OF_TENSOR if run.tensor > 1 else SPARE
    spare = (spare if run.has_layer_stack else SPARE_OF_LISTS) * sum(peak[:-1])
    return Peak(
        state, batch, gradient_bytes, residuals, weight_bytes, moment, messages, spare, moment_kind
    )


# gradients, kept, weights, moment, messages, and the kind of the moment
Moment = tuple[float, float, float, float, float, str]
LOGITS, LAYER, ENDS = "logits", "a layer's arrays", "gradients of embedding and head"


def _layer_moments(
    sizes: Sizes, run: MemoryInputs, gradients: float, weights: WeightBytes
) -> list[Moment]:
    layers, examples = run.layers, run.microbatch_size
    each = sizes.residuals if run.layer_mode == "unrolled" else sizes.loop_residuals
    # Without a loop XLA keeps another array like x: the summands of x in place of x.
    layer = _stacked_bytes(each[0], sizes) if run.layer_mode == "loop" else each[0]
    layer += sizes.carry * (run.layer_mode == "unrolled")
    layer *= examples * (1 - run.offload_ratio)
    sums = gradients if run.gradient_accumulation_steps > 1 else 0.0
    # The head's gradient is computed when those of the logits are used up: it takes their buffer.
    largest_growth = lambda pairs: examples * max((a for a, _ in pairs), default=0.0)
    head = (largest_growth if run.has_layer_stack else partial(max_bytes, examples=examples))(
        sizes.head
    )
    head += LOGITS_GRADIENT * sizes.logits * examples + weights.ends
    around, waits = weights.gradient_ends + weights.ends / 2, sizes.end_residuals[0] * examples
    if not run.has_layer_stack:  # the gradients of all layers
        backward, residuals = weights.gradient_layer + around, layer
    elif (
        run.layer_mode == "loop"
    ):  # it keeps all layers' residuals until its end, and the head's gradient
        backward = (
            max_bytes(sizes.backward, examples) + weights.gradient_layer + weights.gradient_head
        )
        residuals = layers * layer
    else:  # each array's gradient is freed once it is reduced
        backward, residuals = largest_growth(sizes.backward) + weights.largest, layer
    weight_bytes = _weight_bytes(run, weights, 1)
    zeros = gradients if run.layer_mode == "loop" else 0.0  # to which the backward loop adds
    return [
        (sums + zeros, layers * layer, _weight_bytes(run, weights, layers), head, 0.0, LOGITS),
        (gradients + sums, residuals, weight_bytes, backward + waits, 0.0, LAYER),
        (gradients + sums, layer, weight_bytes, around + waits, 0.0, ENDS),
    ]


def _pipeline_moments(
    sizes: Sizes, run: MemoryInputs, gradients: float, weights: WeightBytes
) -> list[Moment]:
    examples, layers = run.microbatch_size, run.layers
    each = (
        _stacked_bytes(sizes.loop_residuals[0], sizes)
        if run.tensor > 1
        else sizes.loop_residuals[0]
    )
    each *= examples * (1 - run.offload_ratio)
    residuals = layers * (run.stash_depth * each + run.crossing * sizes.b_to_w * examples)
    head = max_bytes(sizes.head, examples) + LOGITS_GRADIENT * sizes.logits * examples
    backward, ends = max_bytes(sizes.backward, examples), weights.ends + weights.gradient_ends
    moment_kind = ENDS if ends > max(head, backward) else LOGITS if head > backward else LAYER
    moment, messages = max(head, backward) + ends, 4 * sizes.carry * examples
    return [(gradients, residuals, _weight_bytes(run, weights, 1), moment, messages, moment_kind)]


def _stacked_bytes(each: float, sizes: Sizes) -> float:
    """Return the bytes per example that a loop stacks for a layer."""
    carried = min(sizes.carry, each)
    return carried + LOOPED * (each - carried)


def _weight_bytes(run: MemoryInputs, weights: WeightBytes, layers: int) -> float:
    """Return the bytes of weights that `layers` layers hold beside the state."""
    if run.layer_mode == "loop":
        return weights.transposed + weights.layer_stored + IN_FLIGHT * weights.layer
    if run.layer_mode == "unrolled" and not run.gathers_params:
        return layers * weights.layer
    if run.gathers_params:
        return IN_FLIGHT * weights.layer + layers * weights.layer_stored / 2
    return layers * weights.layer_stored + weights.layer
