"""Which layers each stage gets."""

from hfjax.parallel.arrangement import arrange
from hfjax.parallel.execution import PipelineSchedule
from hfjax.parallel.mesh import PIPE_AXIS, describe_mesh
from hfjax.plan.layout import Layout


def on_stages(layout: Layout, schedule: PipelineSchedule | None) -> Layout:
    """Return the layout with its layers where the schedule wants them."""
    if not layout.blueprint.three_parts:  # there are no layers to arrange
        return layout
    if schedule is None:
        alone = layout.mesh.shape[PIPE_AXIS] == 1
        return layout.as_the_model if alone and layout.arrangement is not None else layout
    homes = schedule.table(layout.mesh.shape[PIPE_AXIS]).homes
    arranged = layout.arranged(arrange(layout.source.shares(len(homes), schedule.balance), homes))
    _check_split(arranged)
    return arranged


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
