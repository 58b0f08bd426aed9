"""New parameters where they are stored: what devices have updated in parts is gathered by layer.

XLA gathers along the first dimension. What is split along another it gathers and then transposes,
and it does that with all parameters at the end of the step, when a second copy of them all is
there. The first dimension of a stack is that of its layers, which nothing but stages splits.
"""

from functools import partial

from jax import lax

from hfjax.parallel.engine.comm_plan import gather_from_moments
from hfjax.parallel.engine.step_context import StepContext
from hfjax.utils.paths import Flat, Index


def gathered(context: StepContext, new: Flat, old: Flat) -> Flat:
    """Return new parameters; each layer of a stack takes the place of the old one.

    Those outside of stacks stay as they are, for XLA's partitioner to gather.
    """
    placed = {
        path: p
        for path, p in context.placed.items()
        if p.stacked and p.moment_only_dims("parameter")
    }
    if not placed:
        return new

    def device(new: Flat, old: Flat) -> Flat:
        def layer(i: Index, stacks: Flat) -> Flat:
            here = {path: lax.dynamic_index_in_dim(new[path], i, 0, False) for path in stacks}
            whole = {path: gather_from_moments(placed[path], x) for path, x in here.items()}
            put = partial(lax.dynamic_update_index_in_dim, index=i, axis=0)
            return {path: put(stacks[path], x) for path, x in whole.items()}

        depths: dict[int, Flat] = {}
        for path, x in old.items():
            depths.setdefault(len(x), {})[path] = x
        done = (lax.fori_loop(0, depth, layer, stacks) for depth, stacks in depths.items())
        return {path: x for stacks in done for path, x in stacks.items()}

    moments, parameters = (
        {path: p.manual(column) for path, p in placed.items()} for column in ("moment", "parameter")
    )
    run = context.shard_map(device, (moments, parameters), parameters)
    of = lambda flat: {path: flat[path] for path in placed}
    return new | run(of(new), of(old))
