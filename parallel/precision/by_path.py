"""Precision by path: patterns of paths, each with the dtypes of the parameters that it matches."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from hfjax.parallel.precision.dtypes import Dtypes, LossScale, Precision, precision_of
from hfjax.utils.tables import align

ALL = "*"


@dataclass(frozen=True)
class PrecisionByPath:
    """Dtypes of a step by the paths of parameters: the last pattern that matches counts.

    The arithmetic of a module follows its parameters. The first layer's input and the batch have
    the dtype of `"*"`. If one entry is float16, the whole step has a loss scale.

    Args:
        given: {pattern: a word, or a `hfjax.Precision`}; `*` stands for anything, also for `/`.
            One of them is `"*"`.

    Example:
        >>> import hfjax
        >>> precision = hfjax.PrecisionByPath({"*": "bf16", "*norm*": "fp32"})
        >>> precision.at("layers/norm_1/scale").compute, precision.at("tokens").compute
        (dtype('float32'), dtype(bfloat16))
    """

    given: Any

    def __post_init__(self) -> None:
        if not isinstance(self.given, Mapping) or not all(isinstance(k, str) for k in self.given):
            raise ValueError(f'precision={self.given!r}: {{pattern: word}} is expected, with "*".')
        if ALL not in self.given:
            raise ValueError(
                f'precision by path, of {", ".join(self.given)}: what is all else? Add "*" as the '
                'first pattern, for instance {"*": "bf16", …}.'
            )
        if any(isinstance(x, PrecisionByPath) for x in self.given.values()):
            raise ValueError("precision by path: an entry is a word or a Precision, not a mapping.")
        entries = tuple((pattern, precision_of(x)) for pattern, x in self.given.items())
        object.__setattr__(self, "given", entries)
        if len({precision.scale for _, precision in entries if precision.scale}) > 1:
            raise ValueError("precision by path: a step has one loss scale. Give one LossScale.")

    def at(self, path: str) -> Precision:
        """Return the precision of a parameter.

        Args:
            path: Its path.

        Example:
            >>> import hfjax
            >>> hfjax.PrecisionByPath({"*": "bf16", "*norm*": "fp32"}).at("tokens").compute
            dtype(bfloat16)
        """
        return next(x for pattern, x in reversed(self.given) if fnmatchcase(path, pattern))

    @property
    def compute(self) -> Any:
        """The dtype of the batch, and of the first layer's input."""
        return dict(self.given)[ALL].compute

    @property
    def enters(self) -> Any:
        """The dtype of the first layer's input."""
        return self.compute

    @property
    def reduce(self) -> Any:
        """The narrowest reduction dtype of the entries."""
        dtypes = [x.reduce for _, x in self.given if x.reduce is not None]
        return min(dtypes, key=lambda dtype: dtype.itemsize, default=None)

    @cached_property
    def scale(self) -> LossScale | None:
        """The loss scale of the step."""
        return next((x.scale for _, x in self.given if x.scale), None)

    def __str__(self) -> str:
        entries = (f"{pattern}: {x.compute or 'stored'}" for pattern, x in self.given)
        return f"{{{', '.join(entries)}}}"


@dataclass(frozen=True)
class DtypesByPath:
    """The dtypes in which a step computes with, gathers and reduces each parameter; print it."""

    dtypes: Mapping[str, Dtypes]

    def __str__(self) -> str:
        lines = [
            (path, *(jnp.dtype(x).name for x in dtypes)) for path, dtypes in self.dtypes.items()
        ]
        return "\n".join(align([("parameter", "computed", "gathered", "reduced"), *lines]))


def matches_path(precision: PrecisionByPath, path: str) -> bool:
    """Return whether a pattern other than "*" matches a path."""
    return any(pattern != ALL and fnmatchcase(path, pattern) for pattern, _ in precision.given)


def parse_precision(spec: Any) -> Any:
    """Return a precision, by path for {"*": "bf16", …} or "bf16,*norm*=fp32"."""
    if isinstance(spec, str) and "=" in spec:
        first, *rest = (entry.strip() for entry in spec.split(","))
        pairs = {path: name for path, _, name in (entry.partition("=") for entry in rest)}
        if "=" in first or ALL in pairs or len(pairs) < len(rest):
            raise ValueError(
                f"precision={spec!r}: a word for all else comes first, then pattern=word, each "
                "pattern once: bf16,*norm*=fp32."
            )
        return PrecisionByPath({ALL: first, **pairs})
    return PrecisionByPath(spec) if isinstance(spec, Mapping) else spec
