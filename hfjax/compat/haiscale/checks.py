"""Checks of a pipe's inputs before anything runs; each error says what to do instead."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hfjax.compat.haiscale.partition import Partition
from hfjax.parallel.make_mesh import as_mesh
from hfjax.parallel.mesh import PIPE_AXIS, SEQUENCE_AXES, describe_mesh, in_use
from hfjax.parallel.precision.dtypes import precision_of
from hfjax.utils.paths import flatten

REMAT = {"never": "none", "except_last": "except_last", "always": "full"}
OPTIONS = ("precision", "gradient_reduction", "reshard_after_forward", "unroll", "compiler_options")


def check_partition(kind: type, chunked: bool, partition: object) -> None:
    """Refuse a partition that a class of pipes cannot run."""
    if not isinstance(partition, Partition):
        raise ValueError(
            f"{kind.__name__} takes a partition, found {type(partition).__name__}. Make one: "
            f"{kind.__name__}(hfjax.compat.partition(layers, stages=4), microbatches=8)."
        )
    if chunked and partition.chunks == 1:
        raise ValueError(
            f"{kind.__name__} runs several parts of the model on each stage, the partition has "
            "one. Use partition(…, chunks=2), or PipeDream."
        )
    if not chunked and partition.chunks > 1:
        raise ValueError(
            f"{kind.__name__} runs one part of the model on each stage, the partition has "
            f"chunks={partition.chunks}. Use Interleaved1F1B, or leave chunks away."
        )


def check_options(microbatches: int | None, remat: str, options: Mapping[str, Any]) -> int:
    """Return the number of microbatches; refuse unknown options of a pipe."""
    if "chunks" in options:
        raise ValueError(
            f"chunks={options['chunks']!r}: what haiscale calls the chunks of a batch are "
            "microbatches here: microbatches=8. Chunks of the model go to partition(…, chunks=2)."
        )
    if unknown := sorted(options.keys() - set(OPTIONS)):
        raise ValueError(
            f"{', '.join(unknown)}: no option of a pipe. Options: mesh, strategy, remat, "
            f"{', '.join(OPTIONS)}. Clipping and the like belong to the optax optimizer."
        )
    if precision_of(options.get("precision", "stored")).scale:
        raise ValueError(
            "a pipe hands its gradients to you, and keeps no loss scale for float16: use "
            'precision="bf16", or hfjax.train_step with hfjax.PIPE.'
        )
    if remat not in REMAT:
        raise ValueError(f"remat={remat!r}: one of {', '.join(REMAT)}.")
    if microbatches is None:
        raise ValueError("microbatches is missing: into how many a batch is split, for instance 8.")
    return microbatches


def check_mesh(mesh: Any, partition: Partition) -> Mesh:
    """Return the mesh; refuse one without the stages of the partition."""
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"mesh is {mesh!r}: a mesh of hfjax.make_mesh is expected, for instance "
            f"hfjax.make_mesh(pipe={partition.stages}, data=2)."
        )
    mesh = as_mesh(mesh)
    if used_axes := in_use(mesh, SEQUENCE_AXES):
        raise ValueError(
            f"mesh {describe_mesh(mesh)}: a pipe takes whole rows, and devices along "
            f"{', '.join(used_axes)} would share them. Use data in its place, or hfjax.train_step "
            "with a schedule and hfjax.PIPE | hfjax.CONTEXT."
        )
    if mesh.shape[PIPE_AXIS] != partition.stages:
        raise ValueError(
            f"mesh {describe_mesh(mesh)} has {mesh.shape[PIPE_AXIS]} stages (pipe), the partition "
            f"{partition.stages}. Use make_mesh(pipe={partition.stages}, …), or partition for "
            f"stages={mesh.shape[PIPE_AXIS]}."
        )
    return mesh


def check_like(name: str, new: object, old: Mapping[str, Any]) -> None:
    """Refuse parameters whose paths, shapes or dtypes differ from the existing ones."""
    if not isinstance(new, Mapping):
        raise ValueError(f"{name}: a dictionary is expected, found {type(new).__name__}.")
    new_arrays, old_arrays = _describe_arrays(new), _describe_arrays(old)
    for path in [*old_arrays, *new_arrays]:
        actual, expected = new_arrays.get(path, "nothing"), old_arrays.get(path, "nothing")
        if actual != expected:
            raise ValueError(
                f"{name}: {path} is {actual}, expected is {expected}. Give what "
                "optax.apply_updates(pipe.parameters, updates) returns, or pipe.load(…) what "
                "pipe.canonical() returned."
            )


def _describe_arrays(tree: Mapping[str, Any]) -> dict[str, str]:
    return {p: f"{jnp.dtype(x.dtype).name} {tuple(x.shape)}" for p, x in flatten(tree).items()}


@contextmanager
def checked_batch(x: Any, labels: Any, criterion: Any) -> Iterator[dict[str, Any]]:
    """Refuse x and labels that do not match; yield them as a batch, whose errors of shape say it.

    The body calls layers and criterion.
    """
    if not isinstance(labels, tuple | list):
        raise ValueError(
            f"labels is {type(labels).__name__}: a tuple is expected, what the criterion takes "
            "after the outputs. For one label: labels=(y,)."
        )
    _check_criterion(criterion, labels)
    _check_examples(x, labels)
    batch = {"x": x, "labels": tuple(labels)}
    try:
        yield batch
    except TypeError as error:
        shapes = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", batch)
        raise ValueError(
            f"the layers or the criterion cannot take x {shapes['x']} with labels "
            f"{shapes['labels']}: x is what enters the first layer, and the criterion is given the "
            f"outputs and the labels. JAX says: {str(error)[:300]}"
        ) from error


def _check_criterion(criterion: object, labels: Sequence[Any]) -> None:
    """Refuse what is no function, or one that takes another number of labels."""
    if not callable(criterion):
        raise ValueError(
            f"criterion is {type(criterion).__name__}: a function (outputs, *labels) -> mean is "
            "expected."
        )
    try:
        inspect.signature(criterion).bind(None, *labels)
    except ValueError:  # some compiled functions have no signature
        return
    except TypeError as error:
        name = getattr(criterion, "__name__", type(criterion).__name__)
        raise ValueError(
            f"criterion {name}{inspect.signature(criterion)} is called as criterion(outputs, "
            f"*labels) with {len(labels)} labels: {error}. Give as many labels as it takes after "
            "the outputs."
        ) from None


def _check_examples(x: Any, labels: Sequence[Any]) -> None:
    """Refuse labels whose number of examples differs from that of x."""
    arrays = [("x", leaf) for leaf in jax.tree.leaves(x)]
    num_inputs = len(arrays)
    for i, label in enumerate(labels):
        arrays += [(f"labels[{i}]", leaf) for leaf in jax.tree.leaves(label)]
    for name, leaf in arrays:
        if not getattr(leaf, "shape", ()):
            raise ValueError(
                f"{name} holds {leaf!r}: arrays with a row for each example are expected."
            )
    if not num_inputs or not all(leaf.shape[0] for _, leaf in arrays[:num_inputs]):
        raise ValueError("x has no examples: give an array with at least one.")
    num_examples = arrays[0][1].shape[0]
    for name, leaf in arrays:
        if leaf.shape[0] != num_examples:
            raise ValueError(
                f"{name} has {leaf.shape[0]} examples, x has {num_examples}. Give one entry of "
                "each label for each example of x."
            )
