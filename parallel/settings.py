"""Settings of a step and their allowed values. Nothing here does what they say."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hfjax.utils.keywords import is_int, strict_fields

CONTEXT_FORMS = ("ring", "allgather", "ulysses")
CONTEXT_ORDERS = ("auto", "zigzag", "contiguous")
MOST = 2**31 - 1  # of a dimension's number
MOST_BYTES = 2**63 - 1
DISPATCH = ("all_to_all", "gather")
KERNEL_WORDS = ("auto", "pallas", "xla", "reference")
KERNELS: Mapping[str, str] = {  # what each does in a training step
    "flash_block": "attention, block by block",
    "cross_entropy": "the loss of a vocabulary, without logits",
    "all_gather_matmul": "the way into a tensor-parallel layer",
    "matmul_reduce_scatter": "the way out of a tensor-parallel layer",
    "all_gather": "parameters, cast while they are sent",
    "reduce_scatter": "gradients, cast while they are sent",
}


@strict_fields
@dataclass(frozen=True)
class ContextParallel:
    """How devices that share a sequence work together, `context=` of `train_step`.

    Attributes:
        form: What is sent. ring: keys and values, from device to device. allgather: the same, in
            one message. ulysses: heads of everything, for positions. auto: what sends fewest bytes.
        ulysses: How many neighbours exchange heads; rings connect their groups. None: as `form`
            says (all under ulysses, else 1; under auto whatever sends least).
        order: Which positions a device has. zigzag: an early and a late chunk, so that causal
            attention costs every device the same. contiguous: one chunk; under a window keys are
            then sent no farther than needed. auto: contiguous if every attention has a window.
        sequence: The sequence dimension of arrays of the batch, by path; None for an array without
            one. Of arrays that are not named it is dimension 1, if they have one.
        gather: How many bytes each device may gather for operations across positions outside of
            attention, for a microbatch and all layers. None: as many as attention or gradients
            send, whichever is more, and 1 MiB at least.

    Example:
        >>> import hfjax
        >>> hfjax.ContextParallel(form="ring", ulysses=2).order
        'auto'
    """

    form: str = "auto"
    ulysses: int | None = None
    order: str = "auto"
    sequence: Mapping[str, int | None] | None = field(default=None, hash=False)
    gather: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("form", ("auto", *CONTEXT_FORMS)), ("order", CONTEXT_ORDERS)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"ContextParallel({name}={getattr(self, name)!r}): one of {', '.join(allowed)}."
                )
        if self.gather is not None and not is_int(self.gather, 0, MOST_BYTES):
            raise ValueError(
                f"ContextParallel(gather={self.gather!r}): a number of bytes, or None."
            )
        for path, dimension in (self.sequence or {}).items():
            if dimension is not None and not is_int(dimension, -MOST, MOST):
                raise ValueError(
                    f"ContextParallel(sequence={{{path!r}: {dimension!r}}}): the number of a "
                    "dimension, or None: the array has no sequence."
                )
        u = self.ulysses
        if u is not None and not is_int(u):
            raise ValueError(
                f"ContextParallel(ulysses={u!r}): how many devices exchange heads, at least 1."
            )


def parse_context(value: Any) -> ContextParallel:
    """Return the settings, given as such, as the name of a form, or as fields."""
    if isinstance(value, ContextParallel):
        return value
    if isinstance(value, str):
        return ContextParallel(value)
    if isinstance(value, dict):
        return ContextParallel(**value)
    raise ValueError(
        f"context={value!r}: a hfjax.ContextParallel is expected, or one of auto, "
        f"{', '.join(CONTEXT_FORMS)}."
    )


def check_dispatch(dispatch: object) -> None:
    """Refuse what is no dispatch."""
    if dispatch not in ("auto", *DISPATCH):
        raise ValueError(f"dispatch={dispatch!r}: one of auto, {', '.join(DISPATCH)}.")


@dataclass(frozen=True)
class KernelChoices:
    """Kernel choices: one for all capabilities, or one for each that is named.

    >>> choices = KernelChoices.of
    >>> choices("auto").choice("flash_block"), choices({"flash_block": "xla"}).rest
    ('auto', 'auto')
    """

    named: tuple[tuple[str, str], ...] = ()
    rest: str = "auto"

    @classmethod
    def of(cls, value: Any) -> "KernelChoices":
        """Return the choices given as one word, or as words by name."""
        if isinstance(value, KernelChoices):
            return value
        choices = dict(value) if isinstance(value, Mapping) else {"*": value}
        for name, choice in choices.items():
            if name != "*" and name not in KERNELS:
                raise ValueError(f"kernels: {name!r} is none of them: {', '.join(KERNELS)}, or *.")
            if not isinstance(choice, str) or choice not in KERNEL_WORDS:
                raise ValueError(
                    f"kernels={choice!r}: one of {', '.join(KERNEL_WORDS)}, or one of them for "
                    'each kernel, for instance {"flash_block": "pallas", "*": "auto"}.'
                )
        rest = choices.pop("*", "auto")
        return cls(tuple(sorted(choices.items())), rest)

    def choice(self, kernel: str) -> str:
        """Return the choice for one capability."""
        return dict(self.named).get(kernel, self.rest)

    def without(self, kernel: str) -> str:
        """Return the setting that leaves one of them out."""
        choices = {**dict(self.named), kernel: "xla", "*": self.rest}
        return json.dumps(choices)
