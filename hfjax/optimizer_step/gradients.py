"""The gradients of a step before its update: from `step.gradients`, for `step.apply`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding

from hfjax.parallel.engine.gradient_engine import GradientEngine
from hfjax.parallel.jaxprs.model_mesh import without_mesh
from hfjax.sharding.layout import State
from hfjax.utils.mean import Mean
from hfjax.utils.paths import Flat, flatten, nest


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["sums", "mean", "variables", "examples", "finite", "norm", "squares"],
    meta_fields=["order", "batched"],
)
@dataclass(frozen=True)
class Gradients:
    """The gradients of a batch, summed over its examples, before they update a state.

    `a + b` are the gradients of the mean over both batches: losses, weights and metrics are summed.
    What the model wrote (running statistics) is averaged by the number of examples; both are
    computed from the same state. To add two losses, add their trees, with `with_tree`.

    Attributes:
        sums: {path: gradient of the summed loss}, sharded as the optimizer state. The gradient of
            the mean, which updates the state, is `sums / mean.weight`; `tree` returns it.
        mean: The loss over all examples, with its metrics: a `hfjax.Mean`.
        variables: What the model wrote to, by path.
        examples: The number of examples.
        finite: Whether the loss and all gradients are finite; False stays False.
        norm: The norm of the gradient of the mean, before clipping. None: `apply` computes it.
        squares: {path: sum of the squares of `sums`}; None if `norm` is None.
        order: The order in which layers of a pipeline are stored; None: no layers are stacked.
        batched: The paths of variables with an entry for each example.

    Example:
        >>> import hfjax, numpy as np, optax
        >>> from flax import nnx
        >>> model = lambda rngs: nnx.Linear(8, 4, rngs=rngs)
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
        >>> step = hfjax.train_step(layout, lambda outputs, batch: (outputs**2).mean())
        >>> state = hfjax.init(layout)
        >>> one, _ = step.gradients(state, np.ones((8, 8), np.float32))
        >>> other, _ = step.gradients(state, np.zeros((16, 8), np.float32))
        >>> type(one + other).__name__, float((one + other).mean.weight)
        ('Gradients', 24.0)
    """

    sums: Flat
    mean: Mean
    variables: Flat
    examples: Any
    finite: Any
    norm: Any = None
    squares: Mapping[str, Any] | None = None
    order: tuple[int, ...] | None = None
    batched: tuple[str, ...] = ()

    @without_mesh
    def tree(self) -> dict[str, Any]:
        """Return the gradients of the mean loss, a tree like `state.params`.

        They are in the dtype of `sums` (float32 or wider) and sharded as the optimizer state.
        Frozen parameters are absent.
        """
        check_not_applied(self)
        return nest({path: x / self.mean.weight.astype(x.dtype) for path, x in self.sums.items()})

    @without_mesh
    def with_tree(self, tree: Any) -> "Gradients":
        """Return these with other gradients of the mean loss, e.g. after surgery on `tree()`.

        Args:
            tree: A tree with the structure and shapes of `tree()`. Whether the step is finite
                stays as it was, and also depends on these.

        Example:
            >>> import hfjax, jax, numpy as np, optax
            >>> from flax import nnx
            >>> model = lambda rngs: nnx.Linear(8, 4, rngs=rngs)
            >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
            >>> step = hfjax.train_step(layout, lambda outputs, batch: (outputs**2).mean())
            >>> state = hfjax.init(layout)
            >>> gradients, _ = step.gradients(state, np.ones((8, 8), np.float32))
            >>> half = gradients.with_tree(jax.tree.map(lambda g: g / 2, gradients.tree()))
            >>> state, metrics = step.apply(state, half)
        """
        check_not_applied(self)
        if not isinstance(tree, Mapping):
            raise ValueError(
                f"with_tree: a tree like tree() is expected, found {type(tree).__name__}."
            )
        new = flatten(tree)
        check_same_arrays("with_tree", self.sums, new)
        weight = self.mean.weight
        sums = {path: (new[path] * weight).astype(x.dtype) for path, x in self.sums.items()}
        return replace(self, sums=sums, norm=None, squares=None)

    @without_mesh
    def __add__(self, other: "Gradients") -> "Gradients":
        if not isinstance(other, Gradients):
            return NotImplemented
        check_not_applied(self)
        check_not_applied(other)
        if self.order != other.order:
            raise ValueError(
                "gradients of two steps that store layers in another order: "
                f"{self.order} and {other.order}. Take both from steps with the same schedule."
            )
        if self.batched:
            raise ValueError(
                f"{', '.join(self.batched)}: variables with an entry for each example of a batch, "
                "so gradients of two batches do not add up. Take one batch of both, or "
                "gradient_accumulation_steps."
            )
        check_same_arrays("a + b", self.sums, other.sums)
        if self.variables.keys() != other.variables.keys():
            names = sorted(self.variables.keys() ^ other.variables.keys())
            raise ValueError(f"a + b: only one of the models writes to {', '.join(names[:5])}.")
        if (names := sorted(self.mean.metrics)) != sorted(other.mean.metrics):
            raise ValueError(
                f"gradients with metrics {names} + gradients with metrics "
                f"{sorted(other.mean.metrics)}: add what has the same metrics."
            )
        return Gradients(
            {path: x + other.sums[path] for path, x in self.sums.items()},
            jax.tree.map(jnp.add, self.mean, other.mean),
            _average_variables(self, other),
            self.examples + other.examples,
            self.finite & other.finite,
            order=self.order,
        )


def compute_gradients(
    engine: GradientEngine,
    state: State,
    batch: Any,
    extra: Any = None,
    extra_specs: Any = None,
) -> tuple[Gradients, dict[str, Any]]:
    """Return the gradients of a batch, and what `engine.returns` requests, by name.

    `forward` and the loss may ask for `extra` by name.
    """
    params, variables = flatten(state.params), flatten(state.variables)
    context, seed = engine.context, None
    if state.scale:
        seed = context.loss_seed(state.scale.value, engine.num_microbatches)
    more = seed, extra, extra_specs
    sums, mean, changed, outputs = engine.gradients(params, variables, batch, state.step, *more)
    returned = {}
    if "losses" in engine.returns:
        returned["losses"] = mean.total / mean.weight
        mean = jax.tree.map(lambda x: x.sum(0), mean)
    if "outputs" in engine.returns:
        sharding = NamedSharding(context.mesh, context.batch_spec)
        returned["outputs"] = lax.with_sharding_constraint(outputs, sharding)
    if seed is not None:
        sums = {path: g / seed for path, g in sums.items()}
    squares, norm = gradient_norm(sums, mean)
    num_examples = jax.tree.leaves(batch)[0].shape[0]
    batched = tuple(sorted(context.batched_variables(changed)))
    gradients = Gradients(sums, mean, changed, num_examples, True, norm, squares, batched=batched)
    return gradients, returned


def gradient_norm(sums: Flat, mean: Mean) -> tuple[Flat, jax.Array]:
    """Return the sum of squares of each gradient, and the norm of the gradient of the mean."""
    squares = {path: (g * g).sum() for path, g in sums.items()}
    return squares, jnp.sqrt(jnp.stack(list(squares.values())).sum()) / mean.weight


def mean_scale(gradients: Gradients, max_grad_norm: float | None) -> jax.Array:
    """Return the factor that turns gradients of the total into those of the mean, clipped."""
    norm: Any = gradients.norm
    scale = 1 / gradients.mean.weight.astype(norm.dtype)
    if max_grad_norm is not None and max_grad_norm <= float(jnp.finfo(norm.dtype).max):
        scale *= max_grad_norm / jnp.maximum(norm, max_grad_norm)
    return scale


def check_not_applied(gradients: Gradients) -> None:
    """Refuse gradients that were given to `step.apply`: it takes their memory."""
    arrays = (x for x in gradients.sums.values() if not isinstance(x, Tracer))
    if any(getattr(x, "is_deleted", bool)() for x in arrays):
        raise ValueError(
            "these gradients were given to an earlier step.apply, which took their memory. To use "
            "them twice, copy them before: jax.tree.map(jnp.copy, gradients)."
        )


def check_same_arrays(owner: str, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> None:
    """Refuse gradients of other parameters, or of other shapes."""
    missing, unknown = (
        sorted(expected.keys() - actual.keys()),
        sorted(actual.keys() - expected.keys()),
    )
    if missing or unknown:
        raise ValueError(
            f"{owner}: gradients of other parameters"
            f"{'; missing: ' + ', '.join(missing[:5]) if missing else ''}"
            f"{'; not expected: ' + ', '.join(unknown[:5]) if unknown else ''}. A gradient of each "
            "trainable parameter is expected, of frozen ones none."
        )
    for path, x in expected.items():
        found = actual[path]
        if not hasattr(found, "dtype") or not jnp.issubdtype(found.dtype, jnp.floating):
            kind = getattr(found, "dtype", type(found).__name__)
            raise ValueError(f"{owner}: the gradient of {path} is of {kind}: floats are expected.")
        if found.shape != x.shape:
            raise ValueError(
                f"{owner}: the gradient of {path} is {list(found.shape)}, {list(x.shape)} is "
                "expected."
            )


def _average_variables(a: Gradients, b: Gradients) -> Flat:
    """Return what the model wrote, averaged by examples; of whole numbers the larger."""

    def average(x: jax.Array, y: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return jnp.maximum(x, y)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        total = x.astype(wide) * a.examples + y.astype(wide) * b.examples
        return (total / (a.examples + b.examples)).astype(x.dtype)

    return {path: average(x, b.variables[path]) for path, x in a.variables.items()}
