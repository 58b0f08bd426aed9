"""What the functions of this folder read of a layout, so that none of them imports it."""

from collections.abc import Mapping
from typing import Any, Protocol

from jax.sharding import Mesh

from hfjax.parallel.engine.blueprint import Blueprint
from hfjax.parallel.placement import Array, Placed
from hfjax.parallel.strategy import Strategy


class LayoutLike(Protocol):
    """What is known of a model and a mesh before any array is there: see `layout.Layout`."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def strategy(self) -> Strategy: ...
    @property
    def blueprint(self) -> Blueprint: ...
    @property
    def arrays(self) -> Mapping[str, Array]: ...
    @property
    def placed(self) -> Mapping[str, Placed]: ...
    @property
    def example(self) -> Any: ...
    @property
    def packed(self) -> Any: ...  # OnStages | None; pyright takes no cached_property for it
    @property
    def hosted(self) -> Any: ...
    @property
    def notes(self) -> Any: ...
    @property
    def state_shapes(self) -> Any: ...
    def bytes_per_device(self) -> dict[str, int]: ...
    def parameter_of(self, keys: tuple, leaf: Any) -> Placed | None: ...
