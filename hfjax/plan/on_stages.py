"""Which layers each stage gets."""

from hfjax.parallel.arrangement import arrange
from hfjax.parallel.mesh import PIPE_AXIS, TENSOR_AXES, describe_mesh, in_use
from hfjax.parallel.schedules.named import Schedule
from hfjax.plan.layout import Layout


def on_stages(layout: Layout, schedule: Schedule | None) -> Layout:
    """Return the layout with its layers where the schedule wants them."""
    if schedule is None:
        alone = layout.mesh.shape[PIPE_AXIS] == 1
        return layout.as_the_model if alone and layout.arrangement is not None else layout
    _check_parts(layout)
    homes = schedule.table(layout.mesh.shape[PIPE_AXIS]).homes
    arranged = layout.arranged(arrange(layout.source.shares(len(homes), schedule.balance), homes))
    _check_split(arranged)
    return arranged


def _check_parts(layout: Layout) -> None:
    """Refuse a schedule for a model that cannot be cut into stages."""
    if not layout.blueprint.three_parts or layout.forward is not None:
        raise ValueError(
            "a schedule needs a model in three parts: methods embed(batch) and head(x), and "
            "`layers`; and no forward= in the layout. docs/any_model.md shows one."
        )
    if layout.blueprint.listed and (axes := in_use(layout.mesh, TENSOR_AXES)):
        raise ValueError(
            f"{describe_mesh(layout.mesh)}: stages of a list of layers run different programs, in "
            f"which the partitioner's collectives over {axes[0]} would wait for each other for "
            f"ever. Use {axes[0]}=1 (data, fsdp and pipe work), or one module of stacked layers."
        )


def _check_split(layout: Layout) -> None:
    if layout.mesh.shape[PIPE_AXIS] == 1:
        return
    for path, p in layout.placed.items():
        if p.stacked and PIPE_AXIS not in p.stays:
            raise ValueError(
                f"{path} {p.shape}: {p.parameter} does not split the layers over {PIPE_AXIS}, and "
                f"the mesh is {describe_mesh(layout.mesh)}. Add hfjax.PIPE to the strategy, or set "
                f'its first entry to "{PIPE_AXIS}".'
            )
