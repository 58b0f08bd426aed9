"""Pipelines of layers that differ: one unit for each virtual stage.

Every stage stores its own parameters, padded to the largest stage (`packing`), and activations of
different shapes are sent in buffers as long as the largest needs. All devices run one program:
every pass is a switch over the virtual stage, on packed values. A device runs only the passes of
its own layers, but compiles those of all. Transfers between devices stay outside of the switch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.parallel.adapters.model_template import Layer
from hfjax.parallel.engine.unshard import unsharded
from hfjax.parallel.jaxprs.split_backward import SplitBackward, trace_passes, zeros_like
from hfjax.parallel.jaxprs.stage_fns import StageFns
from hfjax.parallel.layer_stack.bound_model import BoundModel
from hfjax.parallel.packing import PACKED, PackedLayers, Packing
from hfjax.utils.paths import Flat, Index


@dataclass(frozen=True, eq=False)
class StageSwitch:
    """The passes of virtual stages, each split separately; x and y have one structure for all."""

    stage_passes: Sequence[SplitBackward]  # known: (parameters by path, microbatch)
    parameters: Packing  # of each virtual stage, by path
    unshard: Callable  # (stored buffers, slots) -> unsharded buffers, in the compute dtype
    slots: Any  # what takes the gradients of stored buffers

    def split_backward(self) -> SplitBackward:
        """Return the passes of the virtual stage in `known`: (stored buffers, number, m)."""
        return SplitBackward(
            forward=self._forward,
            backward=self._backward,
            input_backward=self._input_backward,
            weight_backward=self._weight_backward,
            stash=self._stash.like,
            w_residuals=self._w_residuals.like,
            b_to_w=self._b_to_w.like,
        )

    @cached_property
    def _stash(self) -> Packing:
        return Packing([passes.stash for passes in self.stage_passes])

    @cached_property
    def _w_residuals(self) -> Packing:
        return Packing([passes.w_residuals for passes in self.stage_passes])

    @cached_property
    def _b_to_w(self) -> Packing:
        return Packing([passes.b_to_w for passes in self.stage_passes])

    def _forward(self, known: tuple, x: Any) -> tuple:
        values, g, m = known

        def run(i: int, buffers: Flat, m: Index, x: Flat) -> tuple:
            y, stash, w_residuals = self.stage_passes[i].forward(
                self._known_values(i, buffers, m), x
            )
            return y, self._stash.pack(i, stash), self._w_residuals.pack(i, w_residuals)

        return self._switch(g, run, self.unshard(values, None), m, x)

    def _backward(
        self, known: tuple, stash: Flat, w_residuals: list, dy: Flat
    ) -> tuple[Flat, Flat]:
        values, g, m = known
        buffers, scatter = self._unshard_vjp(values)

        def run(i: int, buffers: Flat, m: Index, stash: Flat, dy: Flat) -> tuple[Flat, Flat]:
            operands = self._known_values(i, buffers, m), self._stash.unpack(i, stash), []
            dx, gradients = self.stage_passes[i].backward(*operands, dy)
            return dx, self._pack_gradients(i, buffers, gradients)

        dx, gradients = self._switch(g, run, buffers, m, stash, dy)
        return dx, scatter(gradients)

    def _input_backward(
        self, known: tuple, stash: Flat, w_residuals: Flat, dy: Flat
    ) -> tuple[Flat, Flat]:
        values, g, m = known

        def run(
            i: int, buffers: Flat, m: Index, stash: Flat, w_residuals: Flat, dy: Flat
        ) -> tuple[Flat, Flat]:
            residuals = self._stash.unpack(i, stash), self._w_residuals.unpack(i, w_residuals)
            dx, b_to_w = self.stage_passes[i].input_backward(
                self._known_values(i, buffers, m), *residuals, dy
            )
            return dx, self._b_to_w.pack(i, b_to_w)

        return self._switch(g, run, self.unshard(values, None), m, stash, w_residuals, dy)

    def _weight_backward(self, known: tuple, w_residuals: Flat, b_to_w: Flat) -> Flat:
        values, g, m = known
        buffers, scatter = self._unshard_vjp(values)

        def run(i: int, buffers: Flat, m: Index, w_residuals: Flat, b_to_w: Flat) -> Flat:
            residuals = self._w_residuals.unpack(i, w_residuals), self._b_to_w.unpack(i, b_to_w)
            gradients = self.stage_passes[i].weight_backward(
                self._known_values(i, buffers, m), *residuals
            )
            return self._pack_gradients(i, buffers, gradients)

        return scatter(self._switch(g, run, buffers, m, w_residuals, b_to_w))

    def _switch(self, g: Index, run: Callable, *operands: Any) -> Any:
        return lax.switch(g, [partial(run, i) for i in range(len(self.stage_passes))], *operands)

    def _known_values(self, i: int, buffers: Flat, m: Index) -> tuple[Any, Index]:
        return self.parameters.unpack(i, buffers), m

    def _unshard_vjp(self, values: Flat) -> tuple[Any, Callable]:
        """Return the unsharded buffers, and the pullback of their gradients to the slots."""
        buffers, pullback = jax.vjp(lambda slots: self.unshard(values, slots), self.slots)
        return buffers, lambda gradients: pullback(gradients)[0]

    def _pack_gradients(self, i: int, buffers: Flat, gradients: Any) -> Flat:
        return self.parameters.pack(
            i, gradients, {name: buffer.dtype for name, buffer in buffers.items()}
        )


@dataclass(frozen=True)
class UnevenStageModel:
    """One pass over the microbatches of a step, on this device, of a model whose layers differ.

    It runs the functions of `bound_model`, a unit being all the layers of a virtual stage, and
    packs their inputs and outputs.
    """

    bound_model: BoundModel
    packed: PackedLayers

    def model(self) -> StageFns:
        """Return the functions that the executor runs."""
        bound_model = self.bound_model
        no_remat_model = replace(self, bound_model=replace(bound_model, policy=None))
        return replace(
            bound_model.model(),
            embed=self._first,
            head=self._last,
            layer_passes=self._passes,
            unit_order=bound_model.arrangement.virtual[:, :, None],
            last_passes=no_remat_model._passes if bound_model.keeps_last else None,
        )

    @cached_property
    def _stage_layers(self) -> Sequence[Sequence[Layer]]:
        numbers = self.bound_model.arrangement.stage_layers
        return [[self.bound_model.layers[n] for n in stage] for stage in numbers]

    @cached_property
    def _between(self) -> Packing:
        """The outputs of embed and of each virtual stage."""
        m = jnp.int32(0)
        shapes = [
            jax.eval_shape(self.bound_model.first, self.bound_model.unsharded_outer_params, m)
        ]
        for g in range(len(self._stage_layers)):
            parameters, x = zeros_like(self._compute_shapes(g)), zeros_like(shapes[-1])
            shapes.append(jax.eval_shape(partial(self._run, g), (parameters, m), {}, x))
        return Packing(shapes)

    def _first(self, outside: Flat, m: Index) -> Flat:
        return self._between.pack(0, self.bound_model.first(outside, m))

    def _last(self, outside: Flat, x: Flat, m: Index) -> tuple[jax.Array, Any]:
        return self.bound_model.last(outside, self._between.unpack(len(self._stage_layers), x), m)

    def _passes(self, known: tuple, slots: Flat, x: Flat, split: bool) -> SplitBackward:
        stage_passes = [
            self._passes_of_stage(g, known[2], x, split) for g in range(len(self._stage_layers))
        ]
        return StageSwitch(stage_passes, self.packed.packing, self._unshard, slots).split_backward()

    def _passes_of_stage(self, g: int, m: Index, x: Flat, split: bool) -> SplitBackward:
        """Return the passes of one virtual stage, from packed x to packed y."""

        def run(known: tuple, slots: Flat, x: Flat) -> Flat:
            y = self._run(g, known, slots, self._between.unpack(g, x))
            return self._between.pack(g + 1, y)

        parameters = zeros_like(self._compute_shapes(g))
        return trace_passes(run, (parameters, m), parameters, x, split)

    def _run(self, g: int, known: tuple, slots: Flat, x: Any) -> Any:
        """Return the output of a virtual stage's layers for x."""
        parameters, m = known
        model, layers = self.bound_model, self._stage_layers[g]
        parameter = lambda path: unsharded(path, parameters[path], slots.get(path))
        variables = model.variables(m, None) if any(layer.variables for layer in layers) else {}
        for layer in layers:
            x = model.apply(layer, parameter, variables, x)
        return x

    def _unshard(self, values: Flat, grad_slots: Flat | None) -> Flat:
        """Return a virtual stage's unsharded buffers, by stored dtype, in the compute dtype."""
        slot = lambda path: None if grad_slots is None else grad_slots[path]
        return {
            path.removeprefix(PACKED): self.bound_model.sharded_param(
                path, value, slot(path)
            ).unshard()
            for path, value in values.items()
        }

    def _compute_shapes(self, g: int) -> Flat:
        """Return shapes and dtypes of the parameters of a virtual stage, as they are unsharded."""
        compute_dtype = lambda a: (
            self.bound_model.comm_plans[PACKED + jnp.dtype(a.dtype).name].compute_dtype
        )
        return {
            path: jax.ShapeDtypeStruct(a.shape, compute_dtype(a))
            for path, a in self.packed.packing.trees[g].items()
        }
