"""New parameters as they are stored: shards that devices have updated are all-gathered by layer.

XLA all-gathers along the first dimension. What is sharded along another it gathers and then
transposes, and it does that with all parameters at the end of the step, when there is a second
copy of them all. The first dimension of a stack is that of its layers, which only stages shard.
"""

from functools import partial

from jax import lax

from hfjax.parallel.engine.comm_plan import gather_from_optimizer_state
from hfjax.parallel.engine.step_context import StepContext
from hfjax.utils.paths import Flat, Index


def all_gather_params(context: StepContext, new: Flat, old: Flat) -> Flat:
    """Return new parameters; each layer of a stack replaces the old one.

    Those outside of stacks stay unchanged, for XLA's partitioner to gather.
    """
    param_specs = {
        path: p
        for path, p in context.param_specs.items()
        if p.stacked and p.optimizer_only_dims("parameter")
    }
    if not param_specs:
        return new

    def device(new: Flat, old: Flat) -> Flat:
        def gather_layer(i: Index, stacks: Flat) -> Flat:
            shards = {path: lax.dynamic_index_in_dim(new[path], i, 0, False) for path in stacks}
            full_layers = {
                path: gather_from_optimizer_state(param_specs[path], x)
                for path, x in shards.items()
            }
            put = partial(lax.dynamic_update_index_in_dim, index=i, axis=0)
            return {path: put(stacks[path], x) for path, x in full_layers.items()}

        depths: dict[int, Flat] = {}
        for path, x in old.items():
            depths.setdefault(len(x), {})[path] = x
        new_stacks = (
            lax.fori_loop(0, depth, gather_layer, stacks) for depth, stacks in depths.items()
        )
        return {path: x for stacks in new_stacks for path, x in stacks.items()}

    update_specs, stored_specs = (
        {path: p.manual_spec(column) for path, p in param_specs.items()}
        for column in ("optimizer_state", "parameter")
    )
    gather = context.shard_map(device, (update_specs, stored_specs), stored_specs)
    select = lambda flat: {path: flat[path] for path in param_specs}
    return new | gather(select(new), select(old))
