"""The settings of adapters: `--lora.rank` and the rest."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hfjax.adapters.lora_options import LoraOptions
from hfjax.trainer.config_checks import is_default
from hfjax.utils.read_files import brief, is_number

Names = tuple[str, ...]


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters, which train in place of the parameters of --model.pretrained."""

    rank: int | None = None
    """Rank of the adapters (default: none, all parameters train)."""
    alpha: float | None = None
    """The output of an adapter is multiplied by alpha / rank (default: the rank)."""
    targets: Names = ()
    """Linear maps with an adapter: paths, or names in them, attention mlp (default: all)."""
    dropout: float = 0.0
    """Fraction of the adapters' inputs to drop."""
    use_rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead."""
    rank_pattern: Names = ()
    """Other ranks of some maps: PATTERN=RANK, as in q=32 (default: none)."""
    alpha_pattern: Names = ()
    """Other alphas of some maps: PATTERN=ALPHA (default: none)."""
    modules_to_save: Names = ()
    """Parameters that train whole, tokens unembed (default: none)."""

    def __post_init__(self):
        if self.rank is None:
            return self._check_unused()
        with named_as_flags():
            LoraOptions(**self.options)
        return None

    def _check_unused(self) -> None:
        for name in type(self).__dataclass_fields__:
            if not is_default(self, name):
                flag = name.replace("_", "-")
                raise ValueError(
                    f"--lora.{flag} {brief(getattr(self, name))}: there are adapters only with "
                    "--lora.rank, for instance --lora.rank 16."
                )

    def check_beside(self, pretrained: str | None, frozen: Names) -> None:
        """Refuse adapters of a model that was not trained, and other frozen parameters."""
        if self.rank is not None and pretrained is None:
            raise ValueError(
                f"--lora.rank {self.rank}: adapters change a trained model. Give "
                "--model.pretrained, a folder or ORG/NAME."
            )
        if self.rank is not None and frozen:
            raise ValueError(
                f"--optimizer.frozen {' '.join(frozen)} beside --lora.rank {self.rank}: everything "
                "but the adapters is frozen. Leave it out."
            )

    @property
    def options(self) -> dict[str, Any]:
        """The options of `hfjax.adapters.lora`."""
        targets = {"targets": self.targets} if self.targets else {}
        return {
            **{"rank": self.rank, "alpha": self.alpha, "dropout": self.dropout, **targets},
            "use_rslora": self.use_rslora,
            "rank_pattern": _parse_pattern("rank-pattern", self.rank_pattern, int),
            "alpha_pattern": _parse_pattern("alpha-pattern", self.alpha_pattern, float),
            "modules_to_save": self.modules_to_save,
        }


@contextmanager
def named_as_flags() -> Iterator[None]:
    """Raise errors of `hfjax.adapters.lora` with the names of flags in place of arguments."""
    try:
        yield
    except ValueError as error:
        flag = lambda match: f"--lora.{match[1].replace('_', '-')}{match[2].replace('=', ' ')}"
        raise ValueError(re.sub(r"^lora: (\w+)(=|:)", flag, str(error))) from None


def _parse_pattern(flag: str, entries: Names, kind: Callable[[str], Any]) -> dict[str, Any]:
    """Return {pattern: number} of entries PATTERN=NUMBER."""
    numbers = {}
    for entry in entries:
        pattern, equals, text = entry.rpartition("=")
        try:
            numbers[pattern] = kind(text)
        except ValueError:
            equals = ""
        if not (pattern and equals and is_number(numbers[pattern]) and numbers[pattern]):
            raise ValueError(f"--lora.{flag} {brief(entry)}: PATTERN=NUMBER is needed, as in q=32.")
    return numbers
