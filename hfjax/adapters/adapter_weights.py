"""The weights of adapters that were read from peft's files, streamed in beside the base's."""

from collections.abc import Sequence
from dataclasses import dataclass

from hfjax.adapters.base_weights import BaseWeights
from hfjax.distributed.consensus import check_same, run_on_all
from hfjax.sharding.layout import Layout
from hfjax.utils.paths import Flat
from hfjax.weights.load import WeightStream
from hfjax.weights.tensor_rules import TensorMapping, check_coverage


@dataclass(frozen=True, eq=False)
class AdapterFiles:
    """The files of an adapter; no tensor was read.

    Attributes:
        source: The folder's path, or its name on the Hub.
        fingerprint: A hash of the configuration and of the tensors' header.
        mappings: The mapping of each tensor, of adapters and of modules that train whole.
    """

    source: str
    fingerprint: str
    mappings: Sequence[TensorMapping]


@dataclass(eq=False)
class AdapterWeights:
    """The weights of a base and of its adapters, for `hfjax.init(layout, parameters=…)`.

    Attributes:
        base: The weights of the base.
        files: The files of the adapters.
        read: The bytes that this process has read, once they are in a layout.
    """

    base: BaseWeights
    files: AdapterFiles
    read: int = 0

    def into(self, layout: Layout) -> Flat:
        """Return the parameters for a layout that stores layers in the model's order.

        Args:
            layout: The layout.
        """
        check_same("files of the adapter", {"hash": self.files.fingerprint})
        run_on_all(lambda: self._check(layout))
        params = self.base.into(layout)
        stream = WeightStream(layout, self.files.mappings)
        params |= stream.parameters()
        self.read = self.base.read + stream.read
        return params

    def _check(self, layout: Layout) -> None:
        paths = {m.path for m in self.files.mappings}
        shapes = {path: x.shape for path, x in layout.arrays.items() if path in paths}
        check_coverage(self.files.mappings, shapes)
