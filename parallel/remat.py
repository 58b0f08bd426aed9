"""What layers recompute in the backward pass instead of saving it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from hfjax.parallel.jaxprs.primitives import VIEWS
from hfjax.parallel.jaxprs.saved_tensor import parse_names
from hfjax.parallel.mesh import COLUMN_AXIS, ROW_AXIS

WHAT = ("none", "dots", "full", "except_last")
STATISTICS = "statistics"  # of a norm over the batch: two numbers a channel, and a message

# Cheap to recompute, and a way to save a gathered parameter under another name.
_MOVES = VIEWS.union("all_gather broadcast_in_dim convert_element_type name slice".split())


@dataclass(frozen=True)
class Remat:
    """What is recomputed in the backward pass, and in which layers.

    As strings: "none", "dots", "full", "except_last", "names:qkv,mlp_up", "every:2", "group:4".

    Attributes:
        what: none; dots (all but matmuls); full; except_last (in a pipeline: full in every
            microbatch but the last, whose backward pass comes soon after); or a policy of jax.
        names: All is recomputed but what `jax.ad_checkpoint.checkpoint_name` gave these names.
        every: In one layer of so many, the first; the others save all.
        group: So many layers together: only the input of the first of them is saved.

    Example:
        >>> import hfjax
        >>> hfjax.Remat.of("every:2")
        Remat(what='full', names=(), every=2, group=1)
    """

    what: str | Callable = "full"
    names: tuple[str, ...] = ()
    every: int = 1
    group: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", parse_names(self.names, "remat"))
        if not callable(self.what) and self.what not in WHAT:
            raise _unknown_error(self.what)
        for field in ("every", "group"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"remat {field}={value!r}: a positive number of layers.")
        if self.unit > 1 and (self.what != "full" or min(self.every, self.group) > 1):
            raise ValueError(
                f'{self}: every and group go with what="full", and not with each other.'
            )
        if self.names and (self.what != "full" or self.group > 1):
            raise ValueError(f'{self}: names are what "full" keeps, layer by layer.')

    @classmethod
    def of(cls, given: Any) -> "Remat":
        """Return the Remat that a string, a policy, or a Remat stands for.

        Args:
            given: A Remat (returned as it is), a string as the class lists them, or a policy of
                `jax.checkpoint_policies`.

        Example:
            >>> import hfjax
            >>> hfjax.Remat.of("names:qkv,mlp_up").names
            ('qkv', 'mlp_up')
        """
        if isinstance(given, Remat):
            return given
        head, _, detail = given.partition(":") if isinstance(given, str) else (given, "", "")
        if head == "names" and detail:
            return cls(names=parse_names(detail, "remat"))
        if head == "every" and detail.isdecimal():
            return cls(every=int(detail))
        if head == "group" and detail.isdecimal():
            return cls(group=int(detail))
        if detail or not (callable(given) or isinstance(given, str)):
            raise _unknown_error(given)
        return cls(what=given)

    @property
    def unit(self) -> int:
        """The number of layers that the pattern spans."""
        return max(self.every, self.group)

    def keeping(self, *names: str) -> "Remat":
        """Return a copy that also saves tensors of these names (if they would be recomputed).

        Args:
            names: Names given by `jax.ad_checkpoint.checkpoint_name`. They change nothing unless
                `what` is "full" and layers are not grouped.

        Example:
            >>> import hfjax
            >>> hfjax.Remat("full").keeping("qkv").names
            ('qkv',)
        """
        if self.what != "full" or self.group > 1 or not names:
            return self
        return Remat(self.what, tuple(dict.fromkeys((*self.names, *names))), self.every)

    def policy(
        self, number: int, gathers: bool, keep: bool, seen_names: set[str]
    ) -> Callable | None:
        """Return what layer `number` of the unit may save: a policy for jax.checkpoint, or None.

        `gathers`: its parameters are gathered (or names are requested): views are recomputed;
        `keep`: gathered parameters stay until the backward pass.
        """
        policies = jax.checkpoint_policies
        if self.what == "none" or number % self.every or self.group > 1:
            sliced = self.every > 1  # out of the unit: a saved slice would be a copy
            plain = not gathers and not sliced
            return None if plain or keep else _save_all_but_moves
        policy = self._policy(seen_names)
        return policies.save_from_both_policies(policy, _save_gathers) if keep else policy

    def check(self, seen_names: set[str]) -> None:
        """Refuse names that no layer gave; `seen_names` are those that layers gave."""
        if missing := sorted(set(self.names) - seen_names):
            raise ValueError(
                f"remat names={self.names}: no tensor of a layer is named {missing[0]!r}; named "
                f"are {', '.join(sorted(seen_names)) or 'none'}. Name it in the layer, "
                'x = jax.ad_checkpoint.checkpoint_name(x, "…").'
            )

    def _policy(self, seen_names: set[str]) -> Callable:
        policies = jax.checkpoint_policies
        if callable(self.what):
            return self.what
        if self.names:
            return partial(_save_named, (*self.names, STATISTICS), seen_names)
        small = policies.save_only_these_names(STATISTICS)
        dots = policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, small)
        return dots if self.what == "dots" else small


def _save_all_but_moves(prim, *_, **params) -> bool:
    if prim.name == "name" and getattr(jax.config, "jax_remat3", False):
        return True  # JAX asks about the name then, not about the operation that has it
    return prim.name not in _MOVES or _gathers_activation(prim, params)


def _gathers_activation(prim: Any, params: Mapping[str, Any]) -> bool:
    """Return whether it gathers an activation: over a grid's axes no parameter is gathered."""
    return prim.name == "all_gather" and not {ROW_AXIS, COLUMN_AXIS}.isdisjoint(params["axis_name"])


def _save_named(
    names: tuple[str, ...], seen_names: set[str], prim: Any, *_: Any, **params: Any
) -> bool:
    if prim.name != "name":
        return False
    seen_names.add(params["name"])
    return params["name"] in names


def _save_gathers(prim, *_, **params) -> bool:
    return prim.name == "all_gather" and not _gathers_activation(prim, params)


def _unknown_error(value: object) -> ValueError:
    return ValueError(
        f"remat={value!r}: one of {', '.join(WHAT)}, names:a,b, every:2, group:4, a hfjax.Remat, "
        "or a jax.checkpoint policy."
    )
