"""Which layers each stage gets."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from hfjax.parallel.arrangement import arrange, balanced, counts
from hfjax.parallel.balance import flop_costs, parameter_costs
from hfjax.parallel.layers import items_of
from hfjax.parallel.mesh import PIPE_AXIS, TENSOR_AXES, describe_mesh, in_use
from hfjax.parallel.schedules import Schedule
from hfjax.storage import number_of_layers

if TYPE_CHECKING:
    from hfjax.plan import Layout


def on_stages(layout: "Layout", schedule: Schedule | None) -> "Layout":
    """Return the layout with its layers where the schedule wants them."""
    if schedule is None:
        alone = layout.mesh.shape[PIPE_AXIS] == 1
        return layout.as_the_model if alone and layout.arrangement is not None else layout
    _check_parts(layout)
    homes = schedule.table(layout.mesh.shape[PIPE_AXIS]).homes
    arranged = layout.arranged(arrange(shares(layout, len(homes), schedule.balance), homes))
    _check_split(arranged)
    return arranged


def shares(layout: "Layout", virtual: int, balance: str | Sequence[int]) -> list[int]:
    """Return how many layers each virtual stage gets."""
    if not layout.blueprint.listed or balance == "even" or not isinstance(balance, str):
        return counts(number_of_layers(layout), virtual, balance)
    return balanced(_costs(layout, balance), virtual)


def _costs(layout: "Layout", balance: str) -> list[int]:
    model = layout.blueprint.abstract("eval")
    if balance == "parameters":
        return parameter_costs(list(items_of(model.layers)))
    if layout.example is None:
        raise ValueError(
            'balance="flops" counts what each layer computes on a batch: give the layout one, or '
            'its shapes, hfjax.layout(…, example=batch). Or use balance="parameters", or the '
            "number of layers of each virtual stage."
        )
    return flop_costs(list(items_of(model.layers)), embedded(layout))


def embedded(layout: "Layout") -> Any:
    """Return the shapes of what enters the first layer."""
    plan = layout.blueprint
    shape = lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype)
    arrays = [{p: shape(v) for p, v in of.items()} for of in (plan.parameters, plan.variables)]

    def embed(parameters: Any, variables: Any, batch: Any) -> Any:
        return plan.merge(parameters, variables, "eval").embed(batch)

    return jax.eval_shape(embed, *arrays, layout.example)


def _check_parts(layout: "Layout") -> None:
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


def _check_split(layout: "Layout") -> None:
    if layout.mesh.shape[PIPE_AXIS] == 1:
        return
    for path, p in layout.placed.items():
        if p.stacked and not p.home:
            raise ValueError(
                f"{path} {p.shape}: {p.parameter} does not split the layers over {PIPE_AXIS}, and "
                f"the mesh is {describe_mesh(layout.mesh)}. Add hfjax.PIPE to the strategy, or set "
                f'its first entry to "{PIPE_AXIS}".'
            )
