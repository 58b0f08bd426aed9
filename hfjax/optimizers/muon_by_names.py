"""Muon for matrices that the names of a model's dimensions show, AdamW for all other parameters.

It reads them, and the shardings of its state, while a step is traced (`layout_axes`). The momentum
is kept and updated as the layout shards it; what is orthogonalized are whole matrices
(`matrix_axes`, `matrix_exchange`), by optax.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from hfjax.optimizers.layout_axes import (
    LayoutAxes,
    NamedArray,
    bind_layout,
    current_axes,
    current_sharding,
)
from hfjax.optimizers.matrix_axes import MatrixAxes, MatrixReader
from hfjax.optimizers.matrix_exchange import MatrixExchange
from hfjax.optimizers.transforms import check_rate
from hfjax.utils.keywords import is_int, is_real, parse_dtype
from hfjax.utils.paths import Flat, Tree, flatten, nest

MATRICES, OTHERS = "matrices", "others"

_reader = cache(MatrixReader)  # of a layout


class Momentum(NamedTuple):
    """The state of the matrices: the momentum, as parameters are stored."""

    count: Any
    mu: Any


class MuonGroups(NamedTuple):
    """The state of `muon`: that of the matrices, and that of AdamW."""

    groups: Any

    def notes(self, arrays: Mapping[str, NamedArray]) -> Iterator[str]:
        """Yield who gets what: the matrices of `muon`, and why others have AdamW.

        Args:
            arrays: Path -> shape and names of dimensions, of all parameters.
        """
        reader = MatrixReader(LayoutAxes(arrays))
        find = lambda path: str(reader.find(path, arrays[path].shape))
        momentum, adam = (_moments(self.groups.inner_states[x]) for x in (MATRICES, OTHERS))
        for path in sorted(arrays.keys() & momentum.keys()):
            yield f"muon: {path} {find(path)}"
        reasons: dict[str, list[str]] = {}
        for path in sorted(arrays.keys() & adam.keys()):
            reasons.setdefault(find(path), []).append(path)
        for reason, paths in reasons.items():
            yield f"AdamW beside muon ({reason}): {', '.join(paths)}"


def muon(  # noqa: PLR0913  options of one call, as optax names them
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: Any = (3.4445, -4.7750, 2.0315),
    ns_steps: int = 5,
    beta: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Literal["frobenius", "spectral", "aol", "schatten"] = "frobenius",
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.999,
    adam_eps_root: ArrayLike = 0.0,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    consistent_rms: ArrayLike | None = None,
    ns_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return optax.contrib.muon for each matrix of a model, and AdamW for its other parameters.

    `hfjax.layout` tells it the names of dimensions; `print(layout)` says who gets what. Each layer
    of a stack, each expert, gate and up, and queries, keys and values that share an array are
    matrices of their own; heads times their width is one side of a matrix. Embeddings, heads of
    models, norms, biases and routers get AdamW (hfjax.optimizers.matrix_axes has the names). The
    numbers are those of optax.contrib.muon on a model whose matrices are separate arrays [in, out].

    Where the optimizer state is sharded (FSDP, ZeRO, TENSOR, GRID), devices exchange the matrices
    of a stack by one all-to-all, each orthogonalizes its share, and one more returns them: (n - 1)
    / n of a device's shard each, padded to ceil(layers / n) matrices a device. A matrix of no stack
    is all-gathered. State on the host (HOST_OPTIMIZER) is not exchanged: XLA gathers it.

    Args:
        learning_rate: The rate of the matrices: a number, or a schedule (`hfjax.lr_schedule`).
        ns_coeffs: Coefficients of Newton-Schulz; also "standard" or "dion".
        ns_steps: The number of iterations.
        beta: Decay of the momentum.
        eps: What is added to denominators, also in AdamW.
        weight_decay: Strength of the decay of matrices, times the learning rate.
        weight_decay_mask: Which parameters decay, matrices or not: a tree of booleans, or a
            function of the parameters (`hfjax.optimizers.matching`). None: all.
        mu_dtype: The dtype of the momentum and of Adam's first moment. None: the parameter's.
        nesterov: Whether both use Nesterov momentum.
        adaptive: Whether an update is scaled by the dual norm of its matrix.
        preconditioning: What precedes the iterations.
        adam_b1: Decay of AdamW's first moment.
        adam_b2: Decay of AdamW's second moment.
        adam_eps_root: What is added under AdamW's root.
        adam_weight_decay: Strength of the decay of AdamW's parameters.
        adam_learning_rate: The rate of AdamW. None: that of the matrices.
        consistent_rms: The RMS of an update, for instance 0.2: it is scaled by sqrt(max(in, out))
            times this. None: by sqrt(max(1, out / in)).
        ns_dtype: The dtype in which matrices are exchanged and orthogonalized. None: that of the
            update, as in optax.

    Raises:
        ValueError: It is used without a layout. In `hfjax.layout`: an array of two dimensions or
            more has no names, or they leave open which dimensions are a matrix.

    Example:
        >>> import hfjax
        >>> from hfjax.models.llama import Llama, LlamaConfig
        >>> model = lambda rngs: Llama(LlamaConfig.tiny(), rngs=rngs)
        >>> optimizer = hfjax.optimizers.muon(0.02, adam_learning_rate=3e-3, weight_decay=0.1)
        >>> layout = hfjax.layout(model, optimizer, hfjax.make_mesh(fsdp=8), hfjax.FSDP)
        >>> print("\\n".join(line for line in str(layout).splitlines() if "muon: " in line))
        note: muon: layers/attention/out/kernel 4 x [128, 128]
        note: muon: layers/attention/qkv/kernel 4 x q [128, 128], k and v [128, 64]
        note: muon: layers/mlp/down/kernel 4 x [352, 128]
        note: muon: layers/mlp/gate_up/kernel 8 x [128, 352]
    """
    check_rate("muon", learning_rate)
    if adam_learning_rate is not None:
        check_rate("muon", adam_learning_rate, "adam_learning_rate")
    dtype = _floating_dtype("ns_dtype", ns_dtype)
    _floating_dtype("mu_dtype", mu_dtype)
    numbers = {"beta": beta, "adam_b1": adam_b1, "adam_b2": adam_b2}
    numbers |= {"eps": eps, "adam_eps_root": adam_eps_root, "consistent_rms": consistent_rms}
    numbers |= {"weight_decay": weight_decay, "adam_weight_decay": adam_weight_decay}
    _check_numbers(numbers)
    _check_iterations(ns_coeffs, ns_steps, preconditioning)
    for name, value in {"nesterov": nesterov, "adaptive": adaptive}.items():
        if not isinstance(value, bool):
            raise ValueError(f"muon: {name}={value!r}: True or False.")
    # beta=0 and a rate of -1: what optax makes of the momentum of one matrix.
    single = optax.contrib.muon(
        -1.0,
        ns_coeffs,
        ns_steps,
        0.0,
        eps,
        nesterov=False,
        adaptive=adaptive,
        preconditioning=preconditioning,
        consistent_rms=consistent_rms,
    )

    def orthogonalize(path: str, momentum: jax.Array) -> jax.Array:
        """Return the update of a parameter by its momentum."""
        matrix = _find(path, momentum)
        assert isinstance(matrix, MatrixAxes)
        run_single: Callable = jax.vmap(lambda x: single.update(x, single.init(x), x)[0])
        run = lambda stack: matrix.join(list(map(run_single, matrix.split(stack))))
        x = momentum if dtype is None else momentum.astype(dtype)
        return _map_matrices(path, matrix, run, x).astype(momentum.dtype)

    adam_rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    groups: dict[Hashable, optax.GradientTransformation] = {
        MATRICES: optax.chain(
            _scale_by_momentum(orthogonalize, beta, nesterov, mu_dtype),
            optax.add_decayed_weights(weight_decay, weight_decay_mask),
            optax.scale_by_learning_rate(learning_rate),
        ),
        OTHERS: optax.adamw(
            adam_rate,
            adam_b1,
            adam_b2,
            eps,
            adam_eps_root,
            mu_dtype,
            adam_weight_decay,
            weight_decay_mask,
            nesterov=nesterov,
        ),
    }
    inner = optax.partition(groups, _labels)

    def init(params: Tree) -> MuonGroups:
        return MuonGroups(inner.init(params))

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple:
        updates, new = inner.update(updates, state.groups, params, **extra)
        return updates, MuonGroups(new)

    update.bind_axes = bind_layout  # type: ignore[attr-defined]
    return optax.GradientTransformationExtraArgs(init, update)


PRECONDITIONING = ("frobenius", "spectral", "aol", "schatten")
COEFFICIENTS = ("standard", "dion")


def _floating_dtype(name: str, value: Any) -> Any:
    """Return a dtype, None for None; refuse one that holds no fractions."""
    dtype = None if value is None else parse_dtype(f"muon: {name}", value)
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"muon: {name}={dtype.name}: a floating-point type is expected.")
    return dtype


def _check_numbers(numbers: Mapping[str, Any]) -> None:
    """Refuse numbers out of range; what JAX traces and schedules are not known yet."""
    for name, value in numbers.items():
        if value is None or callable(value) or isinstance(value, jax.Array):
            continue
        is_decay = name in ("beta", "adam_b1", "adam_b2")
        is_below = is_real(value, 0, 1) and value < 1
        if not (is_below if is_decay else is_real(value, 0, math.inf)):
            expected = "a number from 0 to below 1" if is_decay else "a number from 0 on"
            raise ValueError(f"muon: {name}={value!r}: {expected} is expected.")
        if name == "consistent_rms" and not value:
            raise ValueError("muon: consistent_rms=0: no matrix would move. None scales by size.")


def _check_iterations(coefficients: Any, steps: Any, preconditioning: Any) -> None:
    """Refuse coefficients, a number and a start of iterations that optax does not know."""
    if not isinstance(steps, jax.Array) and not is_int(steps):
        raise ValueError(f"muon: ns_steps={steps!r}: a positive number of iterations is expected.")
    if preconditioning not in PRECONDITIONING:
        known = ", ".join(PRECONDITIONING)
        raise ValueError(f"muon: preconditioning={preconditioning!r}: one of {known}.")
    if isinstance(coefficients, str) and coefficients not in COEFFICIENTS:
        known = ", ".join(COEFFICIENTS)
        raise ValueError(f"muon: ns_coeffs={coefficients!r}: one of {known}, or three numbers.")
    if not isinstance(coefficients, str) and jnp.shape(jnp.asarray(coefficients))[-1:] != (3,):
        raise ValueError(f"muon: ns_coeffs={coefficients!r}: three numbers, or rows of three.")


muon.bind_axes = bind_layout  # type: ignore[attr-defined]  # for optax.inject_hyperparams


def _scale_by_momentum(
    orthogonalize: Callable[[str, jax.Array], jax.Array],
    beta: ArrayLike,
    nesterov: bool,
    mu_dtype: DTypeLike | None,
) -> optax.GradientTransformation:
    """Return optax.contrib.scale_by_muon whose orthogonalization is a function of path and array.

    The momentum is element by element, so it stays in the form and sharding of the parameters.
    """

    def init(params: Tree) -> Momentum:
        return Momentum(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params, dtype=mu_dtype))

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Momentum]:
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        count = optax.safe_increment(state.count)
        if nesterov:
            ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
            gradients = optax.tree.bias_correction(updates, beta, count)
            momentum = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, gradients)
        else:
            momentum = optax.tree.bias_correction(mu, beta, count)
        flat = flatten(momentum)
        new = {path: orthogonalize(path, x) if _is_array(x) else x for path, x in flat.items()}
        return nest(new), Momentum(count, optax.tree.cast(mu, mu_dtype))

    return optax.GradientTransformation(init, update)


def _labels(params: Tree) -> dict:
    """Return which group updates each parameter; those that another optimizer has are no arrays."""
    is_matrix = lambda path, x: _is_array(x) and isinstance(_find(path, x), MatrixAxes)
    label = lambda path, x: MATRICES if is_matrix(path, x) else OTHERS
    return nest({path: label(path, x) for path, x in flatten(params).items()})


def _find(path: str, x: Any) -> MatrixAxes | str:
    """Return where the matrices of a parameter are, or why it has none."""
    if (axes := current_axes()) is None:
        raise ValueError(
            "hfjax.optimizers.muon reads the names of a model's dimensions from its layout: pass "
            "it to hfjax.layout(model, muon(…), mesh, strategy), alone or inside optax.chain or "
            "hfjax.optimizers' wrappers, and use layout.optimizer. A wrapper that is no optax "
            "function hides it: wrap optax.contrib.muon instead."
        )
    if path not in (reader := _reader(axes)):
        raise ValueError(f"muon: {path} {list(x.shape)} is no parameter of the layout's model.")
    return reader.find(path, x.shape)


def _map_matrices(path: str, matrix: MatrixAxes, run: Callable, x: jax.Array) -> jax.Array:
    """Return an array whose stack of whole matrices is `run(stack)`."""
    if (sharding := current_sharding(path)) is not None:
        return MatrixExchange(matrix, sharding).map_matrices(run, x)
    return matrix.unstack(run(matrix.stack(x)), x.shape)


def _is_array(x: object) -> bool:
    return hasattr(x, "dtype")


def _moments(state: Any) -> Flat:
    """Return the first moments of a group, by path."""
    has_moments = lambda x: isinstance(x, Momentum | optax.ScaleByAdamState)
    nodes = [x for x in jax.tree.leaves(state, is_leaf=has_moments) if has_moments(x)]
    return {p: x for node in nodes for p, x in flatten(node.mu).items() if _is_array(x)}
