"""What stands against recomputing in all microbatches but the last (torchgpipe's except_last).

In one tick some stages recompute and others do not. No collective is put where stages go different
ways, and a backward pass in two halves would recompute for the first one only.
"""

from collections.abc import Mapping

from jax.sharding import Mesh

from hfjax.parallel.blueprint import LAYERS
from hfjax.parallel.mesh import TENSOR_AXES, describe_mesh, in_use
from hfjax.parallel.reduction import Placed
from hfjax.parallel.schedule import Table


def check_except_last(table: Table, placed: Mapping[str, Placed], mesh: Mesh) -> None:
    """Refuse a table, or a placement, that does not go with remat="except_last"."""
    if table.split:
        raise ValueError(
            f'remat="except_last": {table.name} splits backward passes in two (B and W). Use a '
            'schedule that does not (gpipe, 1f1b, interleaved), or remat="full" or "none".'
        )
    if axes := in_use(mesh, TENSOR_AXES):
        raise ValueError(
            f'remat="except_last" on {describe_mesh(mesh)}: layers send over {axes[0]}, and in a '
            'tick some stages recompute, others do not. Use remat="full" or "none".'
        )
    for path, p in placed.items():
        if path.startswith(LAYERS) and p.split("gradient"):
            raise ValueError(
                f'remat="except_last": the gradient of {path} is scattered layer by layer '
                f"({p.gradient}), and in a tick some stages recompute, others do not. Use "
                'hfjax.ZERO1, which scatters at the end, or remat="full" or "none".'
            )
