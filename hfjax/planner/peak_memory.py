"""The peak of a step by formula: what a device holds at the moments when most is there.

    state        exact, from the layout
    gradients    accumulated, as the layout has them
    kept         by layers for the backward pass: of one microbatch, or of all that a stage holds
    weights      gathered or cast: what layers in flight, or all of them, hold beside the state
    moment       what is there besides, while the head or a layer runs

The largest of the moments counts: at the head everything is kept and no gradient is there; when the
first layer runs backward all gradients are. A program compiled for a GPU is the judge:
benchmarks/planner_memory.py compares 46, and `SPARE` covers what XLA's placing of arrays costs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial

from hfjax.planner.programs.model_profile import Sizes
from hfjax.planner.programs.program_costs import most

SPARE = 0.06  # of temporaries: gaps between arrays, and copies that no formula knows
SPARE_OF_LISTS = 0.3  # of models whose layers are no stack: all is read as one program
SPARE_OF_TENSOR = 0.09  # the same of programs that the partitioner splits
AGAIN = 0.5  # of the logits: their gradient takes their place, and not always all of it
LOOPED = 1.2  # what a loop stacks beside x: XLA keeps some of it before it is cast, or whole
IN_FLIGHT = 2  # layers whose gathered or cast weights are there at once


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of parameters on a device."""

    layer: float  # one layer's, in the type of computing, gathered
    layer_stored: float  # one layer's as they are stored, its part
    turned: float  # of stored layers, what a loop keeps in another order of dimensions
    ends: float  # those around the layers, gathered, in the type of computing
    gradient_layer: float  # the gradient of one layer as it is computed, before it is scattered
    gradient_ends: float  # of what is around the layers, while each device has all of it; else 0
    largest: float  # of the gradients of one layer, that of its largest array
    gradient_head: float  # of `gradient_ends`, that of its largest array


@dataclass(frozen=True)
class Peak:
    """Bytes of one device at the peak, by what they are."""

    state: float
    batch: float
    gradients: float
    kept: float
    weights: float
    moment: float
    messages: float
    spare: float
    what: str = ""  # the moment is: of logits, of a layer, of gradients around the layers

    @property
    def total(self) -> float:
        """All together."""
        first = self.state + self.batch + self.gradients + self.kept
        return first + self.weights + self.moment + self.messages + self.spare

    @property
    def parts(self) -> Mapping[str, float]:
        """The parts by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "what"}


@dataclass(frozen=True)
class Running:
    """How a step runs, as far as memory depends on it."""

    rows: float  # of a microbatch on a device, a row that devices share counted in part
    layers: int  # of a stage
    how: str  # unrolled, in turn, loop
    gathered: bool  # parameters of layers are split over axes of rows
    accumulate: int = 1
    held: float = 0.0  # of a pipeline: microbatches that a stage keeps at most, in whole stages
    stages: int = 1
    crossing: float = 0.0  # those that wait for their weights' gradients, in whole stages
    offload: float = 0.0  # the part of what layers keep that waits on the host
    tensor: int = 1
    stacked: bool = True  # equal layers are known; else all is one program


def peak_of(
    sizes: Sizes, run: Running, state: float, gradients: float, batch: float, weights: WeightBytes
) -> Peak:
    """Return the peak of a step."""
    moments = _of_stages if run.stages > 1 else _of_layers
    found = max(moments(sizes, run, gradients, weights), key=lambda m: sum(m[:-1]))
    sums, kept, held, moment, messages, what = found
    spare = SPARE_OF_TENSOR if run.tensor > 1 else SPARE
    spare = (spare if run.stacked else SPARE_OF_LISTS) * sum(found[:-1])
    return Peak(state, batch, sums, kept, held, moment, messages, spare, what)


# gradients, kept, weights, moment, messages, and what the moment is
Moment = tuple[float, float, float, float, float, str]
LOGITS, LAYER, ENDS = "logits", "a layer's arrays", "gradients of embedding and head"


def _of_layers(sizes: Sizes, run: Running, gradients: float, weights: WeightBytes) -> list[Moment]:
    layers, rows = run.layers, run.rows
    each = sizes.kept if run.how == "unrolled" else sizes.stashed
    # Without a loop XLA keeps another array like x: the summands of x in place of x.
    layer = _stacked(each[0], sizes) if run.how == "loop" else each[0]
    layer += sizes.carried * (run.how == "unrolled")
    layer *= rows * (1 - run.offload)
    sums = gradients if run.accumulate > 1 else 0.0
    # The head's gradient is made when those of the logits are used up: it takes their place.
    of_rows = lambda moments: rows * max((a for a, _ in moments), default=0.0)
    head = (of_rows if run.stacked else partial(most, rows=rows))(sizes.head)
    head += AGAIN * sizes.logits * rows + weights.ends
    around, waits = weights.gradient_ends + weights.ends / 2, sizes.around[0] * rows
    if not run.stacked:  # the gradients of all layers
        backward, kept = weights.gradient_layer + around, layer
    elif run.how == "loop":  # it has what all layers keep until its end, and the head's gradient
        backward = most(sizes.backward, rows) + weights.gradient_layer + weights.gradient_head
        kept = layers * layer
    else:  # each array's gradient goes when it is summed
        backward, kept = of_rows(sizes.backward) + weights.largest, layer
    held = _held(run, weights, 1)
    zeros = gradients if run.how == "loop" else 0.0  # which the loop backward adds to
    return [
        (sums + zeros, layers * layer, _held(run, weights, layers), head, 0.0, LOGITS),
        (gradients + sums, kept, held, backward + waits, 0.0, LAYER),
        (gradients + sums, layer, held, around + waits, 0.0, ENDS),
    ]


def _of_stages(sizes: Sizes, run: Running, gradients: float, weights: WeightBytes) -> list[Moment]:
    rows, layers = run.rows, run.layers
    each = _stacked(sizes.stashed[0], sizes) if run.tensor > 1 else sizes.stashed[0]
    each *= rows * (1 - run.offload)
    kept = layers * (run.held * each + run.crossing * sizes.crossed * rows)
    head = most(sizes.head, rows) + AGAIN * sizes.logits * rows
    backward, ends = most(sizes.backward, rows), weights.ends + weights.gradient_ends
    what = ENDS if ends > max(head, backward) else LOGITS if head > backward else LAYER
    moment, messages = max(head, backward) + ends, 4 * sizes.carried * rows
    return [(gradients, kept, _held(run, weights, 1), moment, messages, what)]


def _stacked(each: float, sizes: Sizes) -> float:
    """Return the bytes of what a loop stacks of a layer, of every row."""
    carried = min(sizes.carried, each)
    return carried + LOOPED * (each - carried)


def _held(run: Running, weights: WeightBytes, layers: int) -> float:
    """Return the bytes of weights that so many layers hold beside the state."""
    if run.how == "loop":
        return weights.turned + weights.layer_stored + IN_FLIGHT * weights.layer
    if run.how == "unrolled" and not run.gathered:
        return layers * weights.layer
    if run.gathered:
        return IN_FLIGHT * weights.layer + layers * weights.layer_stored / 2
    return layers * weights.layer_stored + weights.layer
