"""Assigns layers to stages, and returns the table that stages follow."""

from typing import Any

import jax

from hfjax.parallel.execution import PipelineSchedule
from hfjax.parallel.layer_order import arrange
from hfjax.parallel.mesh import PIPE_AXIS, describe_mesh
from hfjax.parallel.param_specs import num_batch_shards
from hfjax.parallel.schedules.named import forward_table
from hfjax.parallel.schedules.table import Table
from hfjax.sharding.layout import Layout, arrange_layers


def assign_stages(layout: Layout, schedule: PipelineSchedule | None) -> Layout:
    """Return the layout with its layers on the stages of a schedule."""
    if not layout.template.is_layer_stack:  # there are no layers to arrange
        return layout
    if schedule is None:
        is_one_stage = layout.mesh.shape[PIPE_AXIS] == 1
        return (
            layout.model_layout
            if is_one_stage and layout.storage.arrangement is not None
            else layout
        )
    homes = schedule.table(layout.mesh.shape[PIPE_AXIS]).stage_map
    layers_per_stage = layout.storage.source.layers_per_stage(len(homes), schedule.balance)
    new_layout = arrange_layers(layout, arrange(layers_per_stage, homes))
    _check_stage_specs(new_layout)
    return new_layout


def training_table(layout: Layout, schedule: PipelineSchedule | None) -> Table | None:
    """Return the table of a training step; None if there is no pipeline."""
    table = None if schedule is None else schedule.table(layout.mesh.shape[PIPE_AXIS])
    if table is not None and not table.trains:
        raise ValueError(
            f"schedule {table.name} has no backward passes: it evaluates. Give train_step one "
            'that trains, for instance hfjax.Schedule("1f1b", …).'
        )
    return table


def evaluation_table(layout: Layout, schedule: PipelineSchedule | None, batch: Any) -> Table | None:
    """Return the table of an evaluation: as many microbatches as the batch size allows."""
    stages = layout.mesh.shape[PIPE_AXIS]
    if stages == 1 and schedule is None:
        return None
    num_examples = jax.tree.leaves(batch)[0].shape[0] // num_batch_shards(layout.mesh)
    max_microbatches = 4 * stages if schedule is None else schedule.microbatches
    count = max(n for n in range(1, max_microbatches + 1) if num_examples % n == 0)
    arrangement = layout.storage.arrangement
    assert arrangement is not None
    return forward_table(arrangement.homes, count)


def _check_stage_specs(layout: Layout) -> None:
    if (
        layout.mesh.shape[PIPE_AXIS] == 1 or layout.host_memory.parameters
    ):  # refused together with schedules
        return
    for path, p in layout.param_specs.items():
        if p.stacked and PIPE_AXIS not in p.sharded_compute:
            raise ValueError(
                f"{path} {p.shape}: {p.parameter} does not split the layers over {PIPE_AXIS}, and "
                f"the mesh is {describe_mesh(layout.mesh)}. Add hfjax.PIPE to the strategy, or set "
                f'its first entry to "{PIPE_AXIS}".'
            )
