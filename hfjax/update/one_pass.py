"""The update of each shard in one pass: what stands between reduced gradients and the gather."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

from hfjax.base.paths import Flat
from hfjax.optimizers.fused_adamw import AdamWState, Fields, later, opened, recognised
from hfjax.optimizers.transforms import stored_dtype
from hfjax.pallas_kernels import adamw as room
from hfjax.parallel.engine.gradients import Plane
from hfjax.parallel.for_models.kernels import Kernels
from hfjax.plan.layout import Layout, State
from hfjax.update.update import Found, Gradients, Held, Update, select

NOT_OURS = "the optimizer is not hfjax.adamw, or hfjax.master of it, alone"
FORMS: Mapping[str, Callable] = {"pallas": room.adamw_shard, "reference": room.reference}


@dataclass(frozen=True, eq=False)
class OnePassUpdate(Update):
    """The update of a recognised AdamW: every byte of a shard is read once and written once.

    What it computes is what the optimizer does; a step that does not count changes nothing.
    """

    fields: Fields
    steps: Mapping[str, Callable]  # of the shard of each path: the kernel, or its plain form

    @classmethod
    def of(cls, layout: Layout, plane: Plane) -> "OnePassUpdate | None":
        """Return the update in the form that was chosen; None: the optimizer's own is to run."""
        fields, kernels = recognised(layout.optimizer), plane.context.traced.kernels
        if fields is None or layout.hosted:
            _check_not_named(kernels, "the host keeps a part of the state" if fields else NOT_OURS)
            return None
        forms = _forms(layout, kernels)
        if FORMS.keys().isdisjoint(forms.values()):
            return None
        steps = {path: FORMS.get(form, room.reference) for path, form in forms.items()}
        return cls(layout, plane, fields, steps)

    def __call__(self, state: State, batch: Any) -> Found:
        """Return what a pass over the batch finds."""
        gradients = Gradients.of(self.plane, state, batch)
        always = self.plane.context.execution.nonfinite == "apply"

        def update(held: Held, finite: jax.Array) -> Held:
            keep = None if always else finite
            given = gradients.summed, held.parameters, held.optimizer, gradients.scale()
            new = self._updated(*given, keep)
            written = gradients.variables
            return Held(*new, written if always else select(finite, written, held.variables))

        return gradients.found(update)

    def _updated(
        self, gradients: Flat, params: Flat, state: Any, scale: jax.Array, keep: jax.Array | None
    ) -> tuple[Flat, Any]:
        """Return new parameters and state. `scale` is the factor of gradients.

        If `keep` is false everything stays as it was.
        """
        kept, close = opened(self.layout.optimizer, state)
        counts = True if keep is None else keep
        count, rate = optax.safe_increment(kept.updates), self.fields.rate(kept.scheduled)
        known = room.numbers(scale, rate, self.fields.corrections(count), counts)
        own = params if kept.master is None else kept.master
        held = {path: (own[path], kept.mean[path], kept.variance[path]) for path in gradients}
        new = self._on_shards(held, gradients, known, self.fields.decays(params))
        pick = lambda name: {path: getattr(x, name) for path, x in new.items()}
        master = None if kept.master is None else pick("parameter")
        moments = AdamWState(pick("mean"), pick("variance"), *later(kept, counts), master)
        return params | pick("parameter" if master is None else "cast"), close(moments)

    def _on_shards(self, held: Any, gradients: Flat, known: jax.Array, decays: Any) -> dict:
        def device(held: Any, gradients: Flat, known: jax.Array) -> dict:
            of = lambda path: self._settings(bool(decays[path]))
            return {
                path: self.steps[path](*held[path], gradient, known, of(path))
                for path, gradient in gradients.items()
            }

        specs = {path: self.layout.placed[path].moment for path in held}
        places = {"in_specs": (specs, specs, P()), "out_specs": specs}
        run = jax.shard_map(device, mesh=self.layout.mesh, check_vma=False, **places)
        return run(held, gradients, known)

    def _settings(self, decays: bool) -> room.AdamW:
        f = self.fields
        cast = stored_dtype(self.layout.optimizer, None)
        return room.AdamW(f.b1, f.b2, f.eps, f.weight_decay if decays else 0.0, cast)


def _check_not_named(kernels: Kernels, impossible: str) -> None:
    """Refuse the kernel where it was asked for by its name and has no part in the step."""
    if "adamw_shard" in dict(kernels.wanted.named):
        kernels.form("adamw_shard", impossible=impossible)


def _forms(layout: Layout, kernels: Kernels) -> dict[str, str]:
    """Return the form to take for each shard; where one fits neither form, XLA's for all."""
    shards = _shards(layout)
    unlike = [f"{path}: {why}" for path, x in shards.items() if (why := room.unlike(*x))]
    if unlike:
        return {"": kernels.form("adamw_shard", impossible=unlike[0])}
    refusal = lambda path, x: f"{path}: {why}" if (why := room.refuses(*x)) else None
    return {
        path: kernels.form("adamw_shard", refusal(path, x), shape={"N": x[0].size})
        for path, x in shards.items()
    }


def _shards(layout: Layout) -> dict[str, list[jax.ShapeDtypeStruct]]:
    """Return what is updated of each path: parameter, mean, variance and gradient of a shard."""
    kept, _ = opened(layout.optimizer, layout.state_shapes.optimizer)
    found = {}
    for path in kept.mean:
        p = layout.placed[path]
        shard = NamedSharding(p.mesh, p.moment).shard_shape(p.shape)
        dtypes = (layout.working_dtype(path), kept.mean[path].dtype, kept.variance[path].dtype)
        found[path] = [jax.ShapeDtypeStruct(shard, dtype) for dtype in (*dtypes, jnp.float32)]
    return found
