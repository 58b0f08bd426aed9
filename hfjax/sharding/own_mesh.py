"""Specs on a mesh of one's own: a layout restricted to the axes that the mesh has."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from hfjax.parallel.make_mesh import axis_names
from hfjax.parallel.mesh import describe_mesh, in_use
from hfjax.parallel.param_specs import entries_of, spec_of_entries
from hfjax.sharding.host_memory import HostMemory
from hfjax.sharding.storage import Storage
from hfjax.utils.paths import Tree

MeshAxes = Mapping[str, str | None] | None


@dataclass(frozen=True)
class OwnMesh:
    """A mesh of one's own, for which a layout gives specs.

    Attributes:
        mesh: The mesh, axes of any names and types.
        layout_mesh: The mesh of the layout.
        mesh_axes: {its name of an axis: that of the layout}; None: they are the same.
    """

    mesh: Mesh | AbstractMesh
    layout_mesh: Mesh
    mesh_axes: MeshAxes

    def __post_init__(self) -> None:
        """Refuse what is no mesh."""
        if not isinstance(self.mesh, Mesh | AbstractMesh):
            raise ValueError(
                f"mesh is {type(self.mesh).__name__}: a mesh of jax.make_mesh is expected, or None "
                "for the mesh of the layout."
            )

    def restrict_state(self, specs: Tree, storage: Storage, host_memory: HostMemory) -> Any:
        """Return the specs of a state by the names of this mesh.

        Refuse a state that specs alone do not describe: a program of one's own would misread it.
        """
        if why := next(_problems(storage, host_memory), None):
            raise ValueError(f"a mesh of one's own cannot have this state: {why}")
        return self.restrict(specs)

    def restrict(self, specs: Tree) -> Any:
        """Return a tree of specs by the names of this mesh, axes of size 1 left out."""
        names = axis_names(self.mesh, self.mesh_axes)

        def rename(axis: str) -> str:
            name = names.get(axis)
            if name is not None and self.mesh.shape[name] == self.layout_mesh.shape[axis]:
                return name
            raise ValueError(self._mismatch(axis, name))

        def restricted(spec: P) -> P:
            entries = (in_use(self.layout_mesh, axes) for axes in entries_of(spec, len(spec)))
            return spec_of_entries([tuple(map(rename, axes)) for axes in entries])

        return jax.tree.map(restricted, specs, is_leaf=lambda x: isinstance(x, P))

    def _mismatch(self, axis: str, name: str | None) -> str:
        """Return what is wrong: the layout splits over an axis that this mesh does not have so."""
        size, sizes = self.layout_mesh.shape[axis], dict(self.mesh.shape)
        label = axis if name in (None, axis) else f"{axis} ({name} by mesh_axes)"
        actual = f"no {axis}" if name is None else f"{name}={self.mesh.shape[name]}"
        shape = ", ".join(f"{n}={k}" for n, k in sizes.items()) or "no axes"
        return (
            f"the layout, on {describe_mesh(self.layout_mesh)}, splits over {label} of size "
            f"{size}; the mesh has {actual} (it has {shape}). Give a mesh with "
            f"{axis if name is None else name}={size}, name its axes by hfjax.layout(…, "
            f'mesh_axes={{"its name": "{axis}"}}), or make the layout for this mesh: '
            "hfjax.layout(model, optimizer, mesh, …)."
        )


def _problems(storage: Storage, host_memory: HostMemory) -> Iterator[str]:
    in_order = (
        "Use the same layout without a pipeline: layout.model_layout has the layers as the model "
        "does, and hfjax.to_model_order(layout, state) a state of it."
    )
    if storage.packed is not None:
        yield f"stages hold the layers of a list packed into rows. {in_order}"
    elif storage.order is not None and storage.order.tolist() != [*range(len(storage.order))]:
        order = storage.order.tolist()
        yield f"stages store the layers in the order {order}, not in the model's. {in_order}"
    if host_memory:
        parts = {"parameters": host_memory.parameters, "optimizer state": host_memory.optimizer}
        yield (
            f"{' and '.join(part for part, is_there in parts.items() if is_there)} in host memory, "
            "which only hfjax's step moves to the device and back. Leave "
            "HOST_OPTIMIZER and HOST_PARAMETERS out of the strategy."
        )
