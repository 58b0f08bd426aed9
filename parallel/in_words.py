"""What JAX says of a model that cannot run inside a step, in words that tell what to do."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# What an error of JAX says -> what it means here.
_MEANINGS = (
    (
        r"unbound axis name:? ?(?P<name>\w*)",
        "the model or the loss names the axis {name!r}, and the mesh has none of that name. Rows "
        'are split over ("data", "fsdp"): name these, for instance jax.lax.pmean(x, ("data", '
        '"fsdp")).',
    ),
    (
        r"(Manual|Auto|Explicit).{0,80}(Auto|Explicit|Manual)|auto_axes|explicit_axes|reshard",
        "the model places its arrays on a mesh of its own (out_sharding=, jax.sharding.reshard, "
        "auto_axes, jax.shard_map), and inside a step the layout does that. Leave it out of the "
        "model: names of axes in parameters' metadata are read (docs/any_model.md).",
    ),
)


@contextmanager
def in_words(batch: Any, whole: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
    """Raise what is known of errors of a model or a loss as a ValueError that says what to do.

    `whole` are the shapes of variables that have as many rows as the batch of all devices.
    """
    try:
        yield
    except KeyError as error:
        if isinstance(batch, Mapping) and error.args and error.args[0] not in batch:
            raise ValueError(
                f"the model or the loss asks for {error.args[0]!r}, which this batch does not "
                f"have. It has: {', '.join(map(str, batch))}."
            ) from error
        raise
    except (NameError, ValueError, TypeError, AssertionError, NotImplementedError) as error:
        for pattern, meaning in _MEANINGS:
            if found := re.search(pattern, str(error)):
                raise ValueError(
                    f"{meaning.format(**found.groupdict())} JAX says: {str(error)[:300]}"
                ) from error
        if whole and "incompatible shapes" in str(error):
            path, shape = next(iter(whole.items()))
            raise ValueError(
                f"{path} {shape} has as many rows as the whole batch, and each device has some of "
                'them. Let them be split as the batch is: nnx.Variable(x, axes=("batch", '
                f"{', '.join(['None'] * (len(shape) - 1))})). JAX says: {str(error)[:300]}"
            ) from error
        raise
