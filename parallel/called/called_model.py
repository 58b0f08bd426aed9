"""A model that is called as it is, as a step runs it: on the rows of all devices."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from hfjax.base.mean import Mean
from hfjax.base.paths import Flat
from hfjax.parallel.autodiff.varying_state import differing, warn_of_same_noise
from hfjax.parallel.called.gather_on_use import gather_on_use
from hfjax.parallel.engine.fetch import Stored
from hfjax.parallel.engine.forward_asks import TRAIN, asked_by, variable_of
from hfjax.parallel.engine.keys import is_random, per_row
from hfjax.parallel.engine.step_context import StepContext
from hfjax.parallel.in_parts.interpreter import whole_shapes
from hfjax.parallel.in_parts.kinds import Part


@dataclass(frozen=True)
class CalledAsItIs:
    """A model whose own program is run, in parts: it and the loss see all rows."""

    context: StepContext

    def loss(
        self, stored: dict[str, Stored], variables: Flat, batch: Any, mode: str
    ) -> tuple[Mean, Flat]:
        """Return this device's share of the loss, and the variables after it."""
        context = self.context
        told, changed = self._told(stored, variables, batch, mode, context.mean_of_rows)
        return context.counted(context.side.shares(told)), changed

    def outputs(self, stored: dict[str, Stored], variables: Flat, batch: Any) -> Any:
        """Return the outputs of the model: a tree of arrays, `Part` and `Sum`."""
        return self._told(stored, variables, batch, "eval", lambda outputs, batch: outputs)[0]

    def _told(
        self, stored: dict[str, Stored], variables: Flat, batch: Any, mode: str, tell: Callable
    ) -> tuple[Any, Flat]:
        """Return what `tell(outputs, batch)` makes of all rows, as values, and the variables."""
        context = self.context

        def run(parameters: Flat, variables: Flat, batch: Any) -> tuple[Any, Flat]:
            model = context.blueprint.merge(parameters, variables, mode)
            outputs = called(context.forward, model, variables, context.inputs(batch), mode)
            return tell(outputs, batch), variables | context.blueprint.variables_of(model)

        look = partial(self._look, variables, batch) if mode == "train" and context.shares else None
        part = Part if context.side.size > 1 else lambda x: x
        given = {p: part(x) if self._of_rows(p, mode) else x for p, x in variables.items()}
        with_rows = jax.tree.map(part, batch)
        told, changed = gather_on_use(
            run, stored, given, with_rows, side=context.side, told=context.traced.joins, look=look
        )
        for path, old in given.items():
            new = changed[path]
            if new is not old:
                check_written(path, *whole_shapes(context.side, (old, new)))
        here = lambda p: (
            context.side.of_rows if isinstance(given[p], Part) else context.side.whole_of
        )
        same = lambda p: changed[p] is given[p]
        return told, {p: x if same(p) else here(p)(changed[p]) for p, x in variables.items()}

    def _of_rows(self, path: str, mode: str) -> bool:
        """Whether devices have rows of a variable: keys of rows are made for a training step."""
        blueprint = self.context.blueprint
        keys = mode == "train" and per_row(blueprint.variables[path])
        return blueprint.of_rows(path) or keys

    def _look(self, variables: Flat, batch: Any, jaxpr: Any, result: Any) -> None:
        """Warn of noise that devices which share rows draw alike."""
        samples = self.context.shares
        own = {path: self._is_own(path) for path in variables}  # of each device
        given = jax.tree.leaves((own, jax.tree.map(lambda _: True, batch)))
        found = differing(jaxpr, [False] * (len(jaxpr.invars) - len(given)) + given, samples)
        warn_of_same_noise(found.lines)

    def _is_own(self, path: str) -> bool:
        """Whether each device has a variable of its own: a key, or some rows."""
        blueprint = self.context.blueprint
        return is_random(blueprint.variables[path]) or blueprint.of_rows(path)


def called(forward: Callable | None, model: Any, variables: Flat, inputs: Any, mode: str) -> Any:
    """Return the outputs of a model that is called as it is, or by the layout's `forward`."""
    if forward is None:
        return model(inputs) if callable(model) else model
    training = mode == "train"
    key = lambda name: variables[variable_of(name)] if training else None
    asked = {n: training if n == TRAIN else key(n) for n in asked_by(forward)}
    return forward(model, inputs, **asked)


def check_written(path: str, old: Any, new: Any) -> None:
    """Refuse what a variable does not hold from step to step."""
    if (new.shape, new.dtype) != (old.shape, old.dtype):
        raise ValueError(
            f"{path} {old.shape} {old.dtype}: the model writes {new.shape} {new.dtype} to it. What "
            "a variable holds keeps its shape and dtype from step to step."
        )
