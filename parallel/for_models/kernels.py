"""The kernels of a step: handed to the modules and to the optimizer that have use for them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import jax
from jax import lax
from jax.sharding import Mesh

from hfjax.base.tables import aligned
from hfjax.pallas_kernels.attention import block as flash_block
from hfjax.pallas_kernels.choice import KERNELS, Choice, Shape, Wanted, show
from hfjax.pallas_kernels.cross_entropy import loss as cross_entropy
from hfjax.pallas_kernels.handing import Projection
from hfjax.parallel.activation_offload import Offloaded
from hfjax.parallel.for_models import sharded_kernels
from hfjax.parallel.for_models.grid import Grid
from hfjax.parallel.for_models.grid_look import GridLook
from hfjax.parallel.for_models.place import Names
from hfjax.parallel.for_models.plain_head import not_plain
from hfjax.parallel.for_models.shared_rows import SharedRows, window_of
from hfjax.parallel.for_models.spread_experts import SpreadExperts
from hfjax.parallel.mesh import PIPE_AXIS, SAMPLE_AXES, TENSOR_AXES, in_use, size_of


@dataclass(frozen=True)
class Kernels:
    """Chooses the form of each capability on a mesh, and remembers what was chosen: print it.

    Known once the step is traced: what nothing in the step asked for is not in it.
    """

    wanted: Wanted
    mesh: Mesh
    without_logits: bool = False  # the loss takes a Projection in place of logits
    rows: SharedRows | None = None  # what is done where devices share rows
    grid: Grid | GridLook | None = None  # what is done on a grid of tensor parallelism
    spread: SpreadExperts = field(default_factory=SpreadExperts)
    takes_routing: bool = False  # the loss takes what routers told
    choices: dict[str, list[Choice]] = field(default_factory=dict, compare=False)  # by kernel
    chooses_kernels: ClassVar[bool] = True  # a look at the model puts others in their place

    @classmethod
    def of(
        cls,
        wanted: Wanted,
        mesh: Mesh,
        loss: Callable,
        rows: SharedRows | None = None,
        grid: Grid | None = None,
        spread: SpreadExperts | None = None,
    ) -> "Kernels":
        """Return the kernels of a step with this loss."""
        takes = (getattr(loss, f"takes_{what}", False) for what in ("projection", "routing"))
        without_logits, takes_routing = takes
        spread = spread or SpreadExperts()
        return cls(wanted, mesh, without_logits, rows, grid, spread, takes_routing)

    def form(
        self,
        kernel: str,
        refusal: str | None = None,
        impossible: str | None = None,
        shape: Shape | None = None,
    ) -> str:
        """Return the form to take: pallas, xla or reference. See `Wanted.choose`."""
        device = self.mesh.devices.flat[0]
        return self._keep(self.wanted.choose(kernel, device, refusal, impossible, shape), shape)

    def form_of_one(self, kernel: str, refusal: str | None, shape: Shape) -> str:
        """Return the form to take for one of many arrays; one that does not fit goes by XLA."""
        if refusal and self.wanted.word(kernel) == "pallas":
            return self._keep(Choice(kernel, "xla", refusal), shape)
        return self.form(kernel, refusal, shape=shape)

    def forms(self, kernel: str) -> set[str]:
        """Return the forms that were taken of a kernel, over all operands."""
        return {choice.form for choice in self.choices.get(kernel, ())}

    def _keep(self, choice: Choice, shape: Shape | None) -> str:
        """Return the form of a choice, which is remembered with what it was made for."""
        known = self.choices.setdefault(choice.kernel, [])
        choice = replace(choice, of=show(shape))
        if choice not in known:
            known.append(choice)
        return choice.form

    # -- what modules ask for: see hfjax.models.parts.Plain ---------------------------------------

    def attention(self, attend: Callable) -> Callable:
        """Return the attention that a layer runs; one of the user's own stays as it is."""
        if self.grid is not None:
            return self.grid.attention(attend)
        replaceable = getattr(attend, "is_causal_attention", False)
        local = partial(self._attend, attend) if replaceable else attend
        return local if self.rows is None else partial(self._across, self.rows, attend, local)

    def positions(self, length: int, names: Names = ()) -> jax.Array | None:
        """Return the numbers, in whole rows, of the positions here; None: from 0 on."""
        if self.grid is not None and "seq" in names:
            return self.grid.positions(length)
        return None if self.rows is None else self.rows.positions(length)

    def row_length(self, length: int, names: Names = ()) -> int:
        """Return how many positions a whole row has of which there are so many here."""
        if self.grid is not None and "seq" in names:
            return self.grid.row_length(length)
        if self.rows is None:
            return length
        return self.rows.looking or length * self.rows.devices

    @property
    def looks(self) -> bool:
        """Whether the model is only looked at: see `sequence.py`."""
        return self.rows is not None and self.rows.looking is not None

    def run_length(self, length: int) -> int:
        """Return how many positions follow each other, of those here."""
        shared = self.rows is not None and self.rows.positions(length) is not None
        return self.rows.deal.run(length * self.rows.devices) if shared and self.rows else length

    def sum_over_row(self, x: Any) -> Any:
        """Return sums of positions, added over the devices that share rows."""
        return x if self.rows is None or self.looks else lax.psum(x, self.rows.axes)

    def sum_over_batch(self, x: Any) -> Any:
        """Return sums of rows and positions, added over all devices that have others."""
        axes = in_use(self.mesh, SAMPLE_AXES)
        return lax.psum(x, axes) if axes and not self.looks else x

    def experts(self, mixture: Any, x_GTD: jax.Array, routed: Any) -> jax.Array:
        """Return what the experts of a layer, spread over devices or not, make of tokens."""
        return self.spread.run(mixture, x_GTD, routed)

    def told(self, outputs: Any, routed: Callable, needed: bool) -> Any:
        """Return outputs with what routers told, for a loss that takes it."""
        if self.takes_routing:
            return routed(outputs)
        if needed and not self.looks:
            raise ValueError(
                "the routers of this model add to the loss, or balance their loads, and the loss "
                "takes no part in it. Use hfjax.models.moe.next_token_loss; mark a loss of your "
                "own with hfjax.models.moe.takes_routing (it is given hfjax.models.moe.Routed); or "
                "choose Router(balance_loss=0, z_loss=0, bias_rate=0)."
            )
        return outputs

    def matmul(self, place: Any, between: tuple, multiply: Callable) -> Callable:
        """Return the product of a linear map between two named dimensions.

        Where a tensor axis splits the sequence, and one of the two, it may go around the ring.
        """
        if self.grid is not None:
            return self.grid.linear(between, multiply)
        kind = ("all_gather_matmul", "matmul_reduce_scatter")[between[0] != "embed"]
        if self.looks or not place.axes("seq") or not any(map(place.axes, between)):
            return multiply
        return partial(self._multiply, kind, multiply)

    def outputs(
        self, x_BSD: jax.Array, kernel_VD: jax.Array, vocab: int, logits: Callable[[], jax.Array]
    ) -> Any:
        """Return what the loss is given: logits, or a projection that they are never made of."""
        if self.grid is not None:
            return self.grid.outputs(x_BSD, kernel_VD, vocab, logits, self.without_logits)
        if self.looks:
            return logits()
        rows = jax.ShapeDtypeStruct((x_BSD[..., 0].size, x_BSD.shape[-1]), x_BSD.dtype)
        labels = jax.ShapeDtypeStruct(rows.shape[:1], "int32")
        refusal = cross_entropy.refuses(rows, kernel_VD, labels)
        shape = {"N": rows.shape[0], "V": self._share(kernel_VD.shape[0]), "D": rows.shape[1]}
        impossible = self._no_projection(kernel_VD)
        whole = kernel_VD.shape[0]
        if impossible is None and (why := not_plain(logits, x_BSD, kernel_VD, vocab, whole)):
            impossible = f"the model's logits() are more than x @ kernel.T: {why}"
        form = self.form("cross_entropy", refusal, impossible, shape)
        if form not in sharded_kernels.FORMS:
            return logits()
        return Projection(x_BSD, kernel_VD, sharded_kernels.losses(self.mesh, form, vocab))

    def columns(self, width: int) -> tuple[jax.Array, int] | None:
        """Return the numbers of the stream's columns here, and of how many; None: all are."""
        return None if self.grid is None else self.grid.columns(width)

    def mean(self, x: jax.Array, name: str | None) -> jax.Array:
        """Return the mean over the whole of the last dimension, which has a name."""
        return x.mean(-1, keepdims=True) if self.grid is None else self.grid.mean(x, name)

    def lookup(self, table_VD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
        """Return the row of each token in a table that is split along the vocabulary."""
        return table_VD[tokens_BS] if self.grid is None else self.grid.lookup(table_VD, tokens_BS)

    def of_stream(self, x_BS: jax.Array) -> jax.Array:
        """Return what belongs to the positions of the stream that are here."""
        return x_BS if self.grid is None else self.grid.part_of_rows(x_BS)

    # -- each in the form that was chosen ---------------------------------------------------------

    def _attend(self, plain: Callable, *operands: jax.Array) -> jax.Array:
        """The operands: q_BSHD, k_BSGD, v_BSGD, and documents_BS if there are any."""
        q, k, v, *_ = operands
        impossible = self._uneven("heads of keys", k.shape[2])
        shape = {"S": q.shape[1], "D": q.shape[3]}
        form = self.form("flash_block", flash_block.refuses(q, k, v), impossible, shape)
        if form not in sharded_kernels.FORMS:
            return plain(*operands)
        window = window_of(plain)
        return sharded_kernels.attention(self.mesh, form, len(operands) == 4, window)(*operands)

    def _across(
        self, rows: SharedRows, attend: Callable, local: Callable, *given: Any, **named: Any
    ) -> jax.Array:
        """Return attention of the queries here to whole rows, which several devices share."""
        operands = tuple(x for x in given if x is not None)
        if named or not 3 <= len(operands) <= 4:
            raise ValueError(
                f"attention with {len(operands)} arrays{', and ' if named else ''}"
                f"{', '.join(named)}: where devices share rows it takes (q, k, v), and one array "
                "[B, S] more, without names. Close over anything else."
            )
        q, k, v, *_ = operands
        shape = {"S": q.shape[1], "D": q.shape[3]}
        impossible = self._uneven("heads of keys", k.shape[2])
        form = lambda: self.form("flash_block", flash_block.refuses(q, k, v), impossible, shape)
        return rows.attend(attend, local, form, *operands)

    def _multiply(self, kind: str, plain: Callable, x_BSI: jax.Array, kernel_IO: Any) -> jax.Array:
        impossible = self._no_ring(x_BSI)
        refusal = impossible or sharded_kernels.ring_refuses(self.mesh, kind, x_BSI, kernel_IO)
        rows, (inputs, outputs) = x_BSI[..., 0].size, kernel_IO.shape
        form = self.form(kind, refusal, impossible, {"M": rows, "K": inputs, "N": outputs})
        if form not in sharded_kernels.FORMS:
            return plain(x_BSI, kernel_IO)
        return sharded_kernels.ring(self.mesh, form, kind)(x_BSI, kernel_IO)

    # -- what only XLA's form can do --------------------------------------------------------------

    def _share(self, count: int) -> int:
        return -(-count // size_of(TENSOR_AXES, self.mesh))

    def _uneven(self, what: str, count: int) -> str | None:
        shards = size_of(TENSOR_AXES, self.mesh)
        if count % shards == 0:
            return None
        return f"{count} {what} do not divide by a tensor axis of {shards}"

    def _no_projection(self, kernel_VD: jax.Array) -> str | None:
        if self.without_logits:
            return self._uneven("rows of the vocabulary", kernel_VD.shape[0])
        return (
            "the loss takes logits; mark one that takes a projection with "
            "hfjax.pallas_kernels.handing.takes_projection"
        )

    def _no_ring(self, x_BSI: jax.Array) -> str | None:
        if self.mesh.shape[PIPE_AXIS] > 1:
            return "no ring in a pipeline: not all stages would take part in it"
        return self._uneven("positions", x_BSI.shape[1])

    def __str__(self) -> str:
        lines = [line for kernel in KERNELS for line in self._lines(kernel)]
        return "\n".join(aligned(lines))

    def _lines(self, kernel: str) -> list[tuple[str, ...]]:
        """Return a line for each form and reason: the kernel, both, and the operands that go so."""
        together: dict[tuple[str, str], list[str]] = {}
        for choice in self.choices.get(kernel, ()):
            together.setdefault((choice.form, choice.why), []).append(choice.of)
        if not together:
            return [(kernel, "-", "nothing in this step has use for it", "")]
        return [(kernel, *key, "; ".join(filter(None, of))) for key, of in together.items()]


@dataclass
class Traced:
    """Made with a step, and filled in while the step is traced."""

    kernels: Kernels  # which form each kernel takes, and why
    offloaded: Offloaded  # what layers keep for the backward pass, and what of it the host holds
    names: set[str] = field(default_factory=set)  # of tensors, where remat asks for names
    unread: set[str] = field(default_factory=set)  # parameters that nothing has read yet
    written: set[str] = field(default_factory=set)  # variables that the model writes to
    parts: list[dict[int, str]] = field(default_factory=list)  # of outputs on a grid: see Grid

    def begin(self, parameters: Iterable[str]) -> None:
        """Begin a trace: what JAX kept of an earlier one, it must not take for this one's."""
        self.unread, self.written = set(parameters), set()
