"""What may be chosen of adapters, in Python and by flags."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hfjax.utils.keywords import is_int, is_real

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoraOptions:
    """What `lora` takes besides the model."""

    rank: int = 8
    alpha: float | None = None
    targets: tuple[str, ...] = (ALL_LINEAR,)
    dropout: float = 0.0
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    modules_to_save: tuple[str, ...] = ()
    init: str = "uniform"
    dims: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, rank in {"rank": self.rank, **self.rank_pattern}.items():
            if not is_int(rank, 1):
                raise ValueError(f"lora: {name}={rank!r}: a whole number from 1 on is needed.")
        for name, alpha in {"alpha": self.alpha, **self.alpha_pattern}.items():
            if alpha is not None and (not is_real(alpha, -math.inf, math.inf) or not alpha):
                raise ValueError(
                    f"lora: {name}={alpha!r}: a number is needed, not 0: the adapters' outputs "
                    "are multiplied by alpha / rank, and 0 would make them train nothing."
                )
        if not is_real(self.dropout, 0, 1) or self.dropout == 1:
            raise ValueError(f"lora: dropout={self.dropout!r}: from 0 to below 1.")
        if self.init not in ("uniform", "gaussian"):
            raise ValueError(f"lora: init={self.init!r}: uniform or gaussian.")
        if not self.targets:
            raise ValueError(
                "lora: targets=(): patterns of linear maps are expected, for instance "
                f'targets=["attention", "mlp"], or "{ALL_LINEAR}".'
            )
