"""Refuse misspelt keywords, with the nearest known one, and invalid numbers and dtypes.

`attribute_docs` has the fields of a class for the docstring of a function that takes them.
"""

import difflib
import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from types import FunctionType, MappingProxyType
from typing import Any, ParamSpec, TypeGuard, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")
ClassT = TypeVar("ClassT", bound=type)
NEAREST = " (nearest: {})"
LONG_NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

# Keywords of functions and fields of settings, and what they are now, where there is one.
KEYWORDS = {
    "accumulate": ("gradient_accumulation_steps",),
    "clip": ("max_grad_norm",),
    "decay": ("type",),
    "end": ("final_fraction",),
    "hold": ("stable_steps",),
    "length": ("seq_len",),
    "mine": ("local_examples",),
    "moments": ("optimizer_state",),
    "nonfinite": ("on_nonfinite",),
    "patience": ("max_skipped",),
    "reduction": ("gradient_reduction",),
    "rows": ("batch_view", "batch_size", "global_batch_size"),
    "shape": ("warmup_type",),
    "split_rows": ("tensor_overlap_chunks",),
    "warmup": ("warmup_steps",),
}


def closest(name: str, known: Iterable[str]) -> str:
    """Return the known name most similar to an unknown one; an empty one if none is."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), "")


def name_hint(
    name: str,
    known: Iterable[str],
    question: str = " Did you mean {}?",
    now: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return a question with the known name most similar to an unknown one.

    Args:
        name: The unknown name.
        known: The known ones.
        question: The text; {} stands for the name.
        now: Old names, and what they are now.

    >>> name_hint("tensr", ["fsdp", "tensor"]), name_hint("clp", [], now={"clip": "max_norm"})
    (' Did you mean tensor?', ' Did you mean max_norm?')
    """
    near = closest(name, [*known, *now])
    return question.format(now.get(near, near)) if near else ""


def check_keywords(owner: str, keywords: Iterable[str], known: Iterable[str]) -> None:
    """Refuse an unknown keyword.

    >>> check_keywords("train_step", ["remt"], ["max_grad_norm", "remat"])
    Traceback (most recent call last):
    TypeError: train_step has no keyword 'remt'. Did you mean remat? All: max_grad_norm, remat.
    """
    known = list(known)
    for name in keywords:
        if name not in known:
            now = {old: new for old, names in KEYWORDS.items() for new in names if new in known}
            raise TypeError(
                f"{owner}: {name} is {now[name]} now."
                if name in now
                else f"{owner} has no keyword {name!r}.{name_hint(name, known, now=now)} "
                f"All: {', '.join(known)}."
            )


def strict_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function; it refuses an unknown keyword and lists the known ones."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    owner, check = function.__qualname__.removesuffix(".__init__"), check_keywords

    def call(*args: Any, **keywords: Any) -> Any:
        check(owner, keywords, known)
        return function(*args, **keywords)

    return wrap_function(function, call)


def wrap_function(function: Callable[P, R], call: Callable) -> Callable[P, R]:
    """Return `call` in place of a function; it uses no name of its own module.

    It has the globals of the function's module, by which doctest finds what a module defines.
    """
    code_parts = call.__code__, function.__globals__, function.__name__, None, call.__closure__
    return functools.wraps(function)(FunctionType(*code_parts))


def strict_fields(cls: ClassT) -> ClassT:
    """Return the class; it refuses an unknown keyword and lists the known ones."""
    setattr(cls, "__init__", strict_keywords(cls.__init__))  # noqa: B010  pyright: it is a method
    return cls


def attribute_docs(kind: type, indent: int) -> str:
    """Return the attributes section of a class's docstring, indented.

    >>> class Point:
    ...     '''A place.
    ...
    ...     Attributes:
    ...         x: To the right.
    ...     '''
    >>> attribute_docs(Point, 2)
    '  x: To the right.'
    """
    text = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    return textwrap.indent(textwrap.dedent(text), " " * indent)


def parse_dtype(name: str, dtype: Any) -> np.dtype:
    """Return the dtype of a short or long name, or of a dtype; refuse anything else."""
    try:
        return np.dtype(LONG_NAMES.get(dtype, dtype))
    except TypeError:
        raise ValueError(f"{name}={dtype!r}: a dtype, float32, bf16 …, is expected.") from None


def is_int(value: object, least: int = 1, most: float = math.inf) -> TypeGuard[int]:
    """Return whether a value is a whole number within bounds; booleans are not.

    >>> is_int(3, 1), is_int(1.5, 1), is_int(True, 1), is_int(0, 1)
    (True, False, False, False)
    """
    return isinstance(value, Integral) and is_real(value, least, most)


def check_sizes(owner: str, settings: object, *names: str) -> None:
    """Refuse fields that are not positive whole numbers."""
    for name in names:
        if not is_int(size := getattr(settings, name), 1):
            raise ValueError(f"{owner}: {name}={size!r}; a whole number, at least 1, is expected.")


def check_seconds(owner: str, **seconds: Any) -> None:
    """Refuse times that are not positive numbers of seconds."""
    for name, value in seconds.items():
        if not (is_real(value, 0, (1 << 31) - 1) and value > 0):
            raise ValueError(
                f"{owner}: {name}={value!r}; a number of seconds above 0, at most {(1 << 31) - 1}, "
                "is expected."
            )


def is_real(value: object, least: float, most: float) -> bool:
    """Return whether a value is a number within bounds; booleans and NaN are not.

    >>> is_real(0.5, 0, 1), is_real(math.nan, 0, 1), is_real("0.5", 0, 1)
    (True, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return bool(least <= value <= most)  # type: ignore[operator]
