"""Which arrays of a state are in host memory: the column `memory` of a strategy, resolved.

`FSDP | HOST_OPTIMIZER` sets `optimizer_state -> host` there. `layout.Layout.shardings` uses the
answer, `optimizer_step/cpu_offload.py` streams such arrays through the device.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax

from hfjax.parallel.offload.host_memory import largest_first
from hfjax.parallel.param_specs import ParamSpecs, num_shards
from hfjax.parallel.strategy import Strategy

MASTER = "master"  # the field of an optimizer's state that holds master weights


class OptimizerArray(NamedTuple):
    """An array that the optimizer keeps for a parameter."""

    path: str  # of the parameter
    rule: str  # of the column `memory`: optimizer_state or master
    bytes: int  # per device


def find_optimizer_arrays(
    optimizer_state: Any, owner_of: Callable[[tuple, Any], ParamSpecs | None]
) -> dict[str, OptimizerArray]:
    """Return the arrays of an optimizer state that belong to parameters, given its shapes.

    The names are those of `jax.tree_util.keystr`; `owner_of` returns the parameter of an array.
    """
    arrays = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(optimizer_state)[0]:
        if (p := owner_of(keys, leaf)) is not None:
            size = leaf.size * leaf.dtype.itemsize // num_shards(p.optimizer_state, p.mesh)
            arrays[jax.tree_util.keystr(keys)] = OptimizerArray(p.path, rule_of(keys), size)
    return arrays


@dataclass(frozen=True)
class HostMemory:
    """The arrays of a state that are in host memory."""

    strategy: Strategy
    # The optimizer state of each parameter, by name.
    all_optimizer_arrays: Mapping[str, OptimizerArray]

    @property
    def parameters(self) -> bool:
        """Whether parameters are in host memory."""
        return self._target("parameters") == "host"

    @cached_property
    def optimizer(self) -> frozenset[str]:
        """The names (`jax.tree_util.keystr`) of the optimizer's arrays in host memory."""
        return frozenset(self._host_optimizer_state) | (
            frozenset(self._sizes[MASTER]) if self._target(MASTER) == "host" else frozenset()
        )

    def __bool__(self) -> bool:
        return self.parameters or bool(self.optimizer)

    def count_optimizer_state(self, path: str) -> tuple[int, int]:
        """Return how many optimizer arrays of a parameter are on the host, and how many it has."""
        names = [name for name, array in self.all_optimizer_arrays.items() if array.path == path]
        return sum(name in self.optimizer for name in names), len(names)

    @property
    def host_fraction(self) -> float | None:
        """The fraction of the optimizer state's bytes on the host; None: none was requested."""
        if isinstance(self._target("optimizer_state"), str):
            return None
        sizes = self._sizes["optimizer_state"]
        return sum(sizes[name] for name in self._host_optimizer_state) / max(sum(sizes.values()), 1)

    def check(self) -> None:
        """Refuse rules that put nothing into host memory; warn where a fraction is too small."""
        if self.host_fraction == 0:
            warnings.warn(
                f"strategy {self.strategy.name}, memory optimizer_state -> "
                f"{self._target('optimizer_state')}: no array is as small as that, so that the "
                "host keeps nothing. Raise the fraction.",
                stacklevel=2,
            )
        active_rules = [r for r in ("optimizer_state", MASTER) if self._target(r) != "device"]
        if not active_rules or any(self._sizes[rule] for rule in active_rules):
            return
        rules = ", ".join(f"{rule} -> {self._target(rule)}" for rule in active_rules)
        reasons = {
            "optimizer_state": "keeps no array like a parameter",
            MASTER: "keeps no master weights (hfjax.optimizers.master_weights(optimizer) does)",
        }
        raise ValueError(
            f"strategy {self.strategy.name}, memory {rules}: the optimizer "
            f"{' and '.join(reasons[rule] for rule in active_rules)}, so the host would keep "
            "nothing. Leave the row out, or use an optimizer that does."
        )

    def notes(self) -> Iterator[str]:
        """Yield notes for the printed layout."""
        if self.host_fraction is not None:
            target = float(self._target("optimizer_state"))
            yield (
                f"{self.host_fraction:.1%} of the optimizer state's bytes are on the host, "
                f"{target:.1%} are asked for: whole arrays, the largest first, "
                f"{len(self._host_optimizer_state)} of {len(self._sizes['optimizer_state'])}"
            )

    def _target(self, rule: str) -> Any:
        return self.strategy.memory.get(rule, "device")

    @cached_property
    def _host_optimizer_state(self) -> list[str]:
        """The optimizer state in host memory: whole arrays, as many as fit, the largest first."""
        sizes, target = self._sizes["optimizer_state"], self._target("optimizer_state")
        fraction = target if isinstance(target, float) else float(target == "host")
        return largest_first(sizes, fraction * sum(sizes.values()))[0]

    @cached_property
    def _sizes(self) -> dict[str, dict[str, int]]:
        """Rule -> name -> bytes per device."""
        sizes: dict[str, dict[str, int]] = {"optimizer_state": {}, MASTER: {}}
        for name, array in self.all_optimizer_arrays.items():
            sizes[array.rule][name] = array.bytes
        return sizes


def rule_of(keys: tuple) -> str:
    """Return the rule of the column `memory` for an array of an optimizer's state."""
    fields = [getattr(key, "name", None) for key in keys]
    return MASTER if MASTER in fields else "optimizer_state"
