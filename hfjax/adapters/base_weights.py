"""The weights under adapters: streamed from their files, and known by a hash of these.

A checkpoint of a layout with adapters holds the hash in place of these parameters, and restoring
streams them again.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from hfjax.distributed.consensus import check_same, run_on_all
from hfjax.sharding.layout import Layout
from hfjax.utils.paths import Flat
from hfjax.weights.content_hash import combine_hashes, local_hash
from hfjax.weights.load import WeightStream
from hfjax.weights.pretrained import Pretrained
from hfjax.weights.tensor_rules import check_coverage


@dataclass(eq=False)
class BaseWeights:
    """The weights of the model under adapters.

    Attributes:
        model: The model.
        scales: The factor of each adapter's output, by the name of its map.
        hash: The hash of its tensors' bytes; None until they were streamed into a layout.
        read: The bytes that this process has read.
    """

    model: Pretrained
    scales: Mapping[str, float] = field(default_factory=dict)
    hash: str | None = None
    read: int = 0

    def into(self, layout: Layout) -> Flat:
        """Return the base's parameters for a layout that stores layers in the model's order.

        Args:
            layout: The layout.
        """
        check_same("folder of the model", {"hash": self.model.folder.fingerprint})
        mappings = run_on_all(lambda: self.model.mappings)
        tensors = [t for m in mappings for t in (m.tensor, m.twin) if t is not None]
        shapes = {path: layout.arrays[path].shape for path in {m.path for m in mappings}}
        check_coverage(mappings, shapes)
        with ThreadPoolExecutor(1) as executor:  # beside the stream, whose pages it then finds
            hash_future = executor.submit(local_hash, tensors)
            stream = WeightStream(layout, mappings)
            params = stream.parameters()
            self.read, self.hash = stream.read, combine_hashes(run_on_all(hash_future.result))
        return params

    def record(self) -> dict[str, Any] | None:
        """Return what a checkpoint says of the base; None if it was not streamed from the files."""
        if self.hash is None:
            return None
        source = self.model.folder.source
        return {"source": source, "hash": self.hash, "scales": dict(self.scales)}

    def check(self, record: Mapping[str, Any], label: str) -> None:
        """Refuse weights other than those that a checkpoint's adapters were trained on.

        Args:
            record: What the checkpoint says of its base.
            label: The name of the checkpoint.
        """
        scales = record.get("scales") or {}
        for name, scale in self.scales.items():
            if scales.get(name, scale) != scale:
                raise ValueError(
                    f"{label}: the output of the adapter of {name} was multiplied by "
                    f"{scales[name]:g} in training, and would be by {scale:g} now: that computes "
                    "something else. Give the rank, alpha and use_rslora that it was trained with."
                )
        if self.hash != record.get("hash"):
            raise ValueError(
                f"{label} holds adapters of {record.get('source')}, whose weights have the hash "
                f"{record.get('hash')}; those of {self.model.folder.source} have {self.hash}: they "
                "are others, though the shapes are the same. Give the model that the adapters were "
                "trained on."
            )
