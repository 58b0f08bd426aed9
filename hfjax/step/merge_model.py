"""The model of a state: on one device (`to_model`), or inside a program (`merge`)."""

from typing import Any

import jax.numpy as jnp

from hfjax.parallel.jaxprs.model_mesh import without_mesh
from hfjax.sharding.check_state import check_layout, check_layout_and_state, check_state_shapes
from hfjax.sharding.layout import Layout, State
from hfjax.sharding.reorder_layers import rearrange
from hfjax.step.batches import full_array
from hfjax.utils.paths import flatten


@without_mesh
def to_model(layout: Layout, state: State) -> Any:
    """Return the model as `model_init` makes it, with the parameters and variables of a state.

    It is unsharded, on one device, and independent of the mesh: call it, save it, pass it on, train
    it in a loop of your own (`nnx.Optimizer`). A bare pytree comes back as its own tree.

    Args:
        layout: The layout under which the state was made, trained or restored.
        state: The state; it is not donated. Layers may be stored for any schedule.

    Example:
        >>> import hfjax, numpy as np, optax
        >>> from flax import nnx
        >>> model = lambda rngs: nnx.Linear(8, 4, rngs=rngs)
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(fsdp=8), hfjax.FSDP)
        >>> linear = hfjax.to_model(layout, hfjax.init(layout))
        >>> type(linear).__name__, linear(np.ones((2, 8), np.float32)).shape
        ('Linear', (2, 4))
    """
    check_layout_and_state("module", layout, state)
    state = rearrange(layout.model_layout, state)
    check_state_shapes(layout.model_layout, state, optimizer=False)
    full_arrays = lambda tree: {
        path: jnp.asarray(x) for path, x in flatten(full_array(tree)).items()
    }
    return layout.template.merge(full_arrays(state.params), full_arrays(state.variables), "model")


@without_mesh
def merge(layout: Layout, params: Any, variables: Any = None, *, train: bool = False) -> Any:
    """Return the model with these arrays, to call it inside a `forward` or a loss.

    So another network, whose arrays are `extra` of `step.gradients`, is a model again, as by
    `nnx.merge`.

    Args:
        layout: The layout of that network.
        params: Its parameters, a tree like `state.params`, with layers in the model's order (of a
            pipeline's state: `hfjax.to_model_order`).
        variables: A tree like `state.variables`; None if the model has no variables.
        train: Whether the model is in training mode.

    Example:
        >>> import hfjax, numpy as np, optax
        >>> from flax import nnx
        >>> model = lambda rngs: nnx.Linear(8, 4, rngs=rngs)
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
        >>> params = hfjax.init(layout).params
        >>> hfjax.merge(layout, params)(np.ones((2, 8), np.float32)).shape
        (2, 4)
    """
    check_layout(layout)
    arrays, others = flatten(params), flatten(variables or {})
    expected = layout.template.parameters.keys(), layout.template.variables.keys()
    for name, tree, paths in zip(("params", "variables"), (arrays, others), expected, strict=True):
        if missing := sorted(paths - tree.keys()):
            raise ValueError(
                f"merge: {name} lacks {', '.join(missing[:5])}. Give {name} of a state of this "
                f"layout: a tree like state.{name}."
            )
    return layout.template.merge(arrays, others, "train" if train else "eval")
