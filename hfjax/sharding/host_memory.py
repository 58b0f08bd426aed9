"""Which arrays of a state lie on the host: the column `memory` of a strategy, resolved.

`FSDP | HOST_OPTIMIZER` puts `moments -> host` there. `layout.Layout.shardings` uses the answer,
`optimizer_step/cpu_offload.py` streams such arrays through the device.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax

from hfjax.parallel.offload.host_memory import largest_first
from hfjax.parallel.param_specs import Placed, pieces
from hfjax.parallel.strategy import Strategy

MASTER = "master"  # the field of an optimizer's state that holds master weights


class OptimizerArray(NamedTuple):
    """An array that the optimizer keeps of a parameter."""

    path: str  # of the parameter
    rule: str  # of the column `memory`: moments or master
    bytes: int  # on a device


def kept_of(
    optimizer: Any, owner: Callable[[tuple, Any], Placed | None]
) -> dict[str, OptimizerArray]:
    """Return what an optimizer's state keeps of parameters, given its shapes.

    The names are those of `jax.tree_util.keystr`; `owner` says of which parameter an array is.
    """
    found = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(optimizer)[0]:
        if (p := owner(keys, leaf)) is not None:
            size = leaf.size * leaf.dtype.itemsize // pieces(p.moment, p.mesh)
            found[jax.tree_util.keystr(keys)] = OptimizerArray(p.path, _row(keys), size)
    return found


@dataclass(frozen=True)
class Hosted:
    """The arrays of a state that lie on the host."""

    strategy: Strategy
    kept: Mapping[str, OptimizerArray]  # what the optimizer keeps of each parameter, by name

    @property
    def parameters(self) -> bool:
        """Whether parameters are kept on the host."""
        return self._wanted("parameters") == "host"

    @cached_property
    def optimizer(self) -> frozenset[str]:
        """The names of the arrays of the optimizer that do, as `jax.tree_util.keystr` has them."""
        return frozenset(self._moments) | (
            frozenset(self._sizes[MASTER]) if self._wanted(MASTER) == "host" else frozenset()
        )

    def __bool__(self) -> bool:
        return self.parameters or bool(self.optimizer)

    def of(self, path: str) -> tuple[int, int]:
        """Return how many moments of a parameter lie on the host, and how many it has."""
        names = [name for name, kept in self.kept.items() if kept.path == path]
        return sum(name in self.optimizer for name in names), len(names)

    @property
    def reached(self) -> float | None:
        """The share of the moments' bytes on the host; None where no share was asked for."""
        if isinstance(self._wanted("moments"), str):
            return None
        sizes = self._sizes["moments"]
        return sum(sizes[name] for name in self._moments) / max(sum(sizes.values()), 1)

    def check(self) -> None:
        """Refuse rules that find nothing to keep on the host; warn where a share is too small."""
        if self.reached == 0:
            warnings.warn(
                f"strategy {self.strategy.name}, memory moments -> "
                f"{self._wanted('moments')}: no array is as small as that, so that the host keeps "
                "nothing. Raise the share.",
                stacklevel=2,
            )
        asked = [rule for rule in ("moments", MASTER) if self._wanted(rule) != "device"]
        if not asked or any(self._sizes[rule] for rule in asked):
            return
        rules = ", ".join(f"{rule} -> {self._wanted(rule)}" for rule in asked)
        none = {
            "moments": "keeps no array like a parameter",
            MASTER: "keeps no master weights (hfjax.master(optimizer) does)",
        }
        raise ValueError(
            f"strategy {self.strategy.name}, memory {rules}: the optimizer "
            f"{' and '.join(none[rule] for rule in asked)}, so the host would keep nothing. Leave "
            "the row out, or use an optimizer that does."
        )

    def notes(self) -> Iterator[str]:
        """Yield what a layout has to tell of it."""
        if self.reached is not None:
            asked = float(self._wanted("moments"))
            yield (
                f"{self.reached:.1%} of the moments' bytes lie on the host, {asked:.1%} are asked "
                f"for: whole arrays, the largest first, {len(self._moments)} of "
                f"{len(self._sizes['moments'])}"
            )

    def _wanted(self, rule: str) -> Any:
        return self.strategy.memory.get(rule, "device")

    @cached_property
    def _moments(self) -> list[str]:
        """The moments that lie on the host: whole arrays, as many as fit, the largest first."""
        sizes, wanted = self._sizes["moments"], self._wanted("moments")
        share = wanted if isinstance(wanted, float) else float(wanted == "host")
        return largest_first(sizes, share * sum(sizes.values()))[0]

    @cached_property
    def _sizes(self) -> dict[str, dict[str, int]]:
        """Row -> name -> bytes on a device."""
        sizes: dict[str, dict[str, int]] = {"moments": {}, MASTER: {}}
        for name, kept in self.kept.items():
            sizes[kept.rule][name] = kept.bytes
        return sizes


def _row(keys: tuple) -> str:
    fields = [getattr(key, "name", None) for key in keys]
    return MASTER if MASTER in fields else "moments"
