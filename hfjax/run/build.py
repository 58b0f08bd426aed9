"""From a configuration to what runs: model, optimizer, mesh, strategy, layout, step, data."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import jax
import optax

import hfjax
from hfjax.batches import rows_of_process
from hfjax.data import Loader, TokenSet, standard_library
from hfjax.data.tokens import SPLITS
from hfjax.models import gpt, llama
from hfjax.optimizers import scaled
from hfjax.parallel.mesh import describe_mesh
from hfjax.paths import flatten, matches, nest
from hfjax.run.config import Train
from hfjax.run.files import function

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tensor", "sequence", "pipe")
NO_DECAY = ("*/bias", "*norm*", "norm*")
ROUND_TO = 128  # a vocabulary that divides over the devices, and fits their matmuls
SHAPE = ("length", "layers", "heads", "embed")


@dataclass(frozen=True)
class Parts:
    """Everything that a run is made of; what is not asked for is not made."""

    config: Train

    @cached_property
    def model(self) -> "Chosen":
        """The model, for the vocabulary of the data."""
        return choose(self.config, self.tokens[0].vocab)

    @cached_property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices."""
        return mesh_of(self.config)

    @cached_property
    def layout(self) -> hfjax.Layout:
        """Where everything lives."""
        strategy, frozen = strategy_of(self.config.strategy), self.config.optimizer.frozen
        optimizer = optimizer_of(self.config, self.rate)
        made = hfjax.layout(self.model.init, optimizer, self.mesh, strategy)
        return made.freeze(*frozen) if frozen else made

    @cached_property
    def rate(self) -> Callable:
        """The learning rate, by the number of updates."""
        given, steps = self.config.optimizer, self.config.steps
        fields = {"warmup": given.warmup, "end": given.end, "hold": given.hold}
        if fields["warmup"] + fields["hold"] >= steps:  # a run of a few steps
            fields["warmup"], fields["hold"] = min(given.warmup, steps // 4), 0
        return hfjax.rate(given.rate, steps=steps, decay=given.decay, **fields)

    @cached_property
    def schedule(self) -> hfjax.Schedule | None:
        """The schedule of the pipeline."""
        stages, given = self.config.mesh.pipe, self.config.pipeline
        if stages == 1:
            return None
        chunks: dict[str, Any] = {} if given.chunks is None else {"chunks": given.chunks}
        return hfjax.Schedule(given.name, given.microbatches or 4 * stages, **chunks)

    @cached_property
    def step(self) -> Any:
        """The training step."""
        c = self.config
        return hfjax.train_step(
            self.layout,
            self.model.loss,
            accumulate=c.accumulate,
            schedule=self.schedule,
            clip=c.optimizer.clip,
            precision=c.precision,
            remat=c.remat,
            nonfinite=c.nonfinite,
        )

    @cached_property
    def evaluate(self) -> Callable:
        """The evaluation: (state, batch) -> metrics."""
        c = self.config
        return hfjax.eval_step(self.layout, self.model.loss, c.precision, self.schedule)

    @cached_property
    def tokens(self) -> list[TokenSet]:
        """The data sets to train on."""
        given = self.config.data.train
        places = [Path(place) for place in given] if given else [standard_library()]
        return [TokenSet(part(place, SPLITS[0]) or place) for place in places]

    @cached_property
    def data(self) -> Loader:
        """The batches to train on: of the rows that this process gives."""
        c = self.config.data
        return self._loader(self.tokens, epochs=c.epochs, weights=c.weights, seed=self.config.seed)

    @cached_property
    def valid(self) -> Loader | None:
        """The batches to validate on: each row once, in order; None: there are none."""
        given = self.config.data.valid
        found = given if given is not None else self._valid_part()
        if found is None:
            return None
        return self._loader(TokenSet(found), shuffle=False, epochs=1, pad_last=True)

    def _valid_part(self) -> Path | None:
        given = self.config.data.train
        return part(Path(given[0]) if given else standard_library(), SPLITS[1])

    def _loader(self, data: Any, **fields: Any) -> Loader:
        batch, packing = self.config.batch, self.config.data.packing
        mine = rows_of_process(self.layout, batch)
        loader = Loader(data, batch, self.model.length, packing=packing, mine=mine, **fields)
        loader.check(self.model.vocab, self.model.most)
        return loader

    def __str__(self) -> str:
        count = sum(math.prod(a.shape) for a in self.layout.arrays.values())
        devices = f"{self.mesh.size} of {jax.device_count()} devices, " * self._idle
        return (
            f"{self.model.name}: {human(count)} parameters, {self.layout.strategy.name} on "
            f"{describe_mesh(self.mesh)} ({devices}{self.mesh.devices.flat[0].device_kind})"
        )

    @property
    def _idle(self) -> bool:
        return self.mesh.size < jax.device_count()


def human(count: float) -> str:
    """Return a large number in few characters.

    >>> human(124_439_808), human(812)
    ('124.4M', '812')
    """
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return f"{count:g}"


def part(place: Path, name: str) -> Path | None:
    """Return that part of a data set, if it has one."""
    return place / name if (place / name).is_dir() else None


# -- the model ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """A model to train, and what is known of it."""

    name: str
    init: Callable
    loss: Callable
    vocab: int
    length: int  # of the rows
    most: int | None = None  # the longest row that the model takes, if it has a limit
    shape: Any = None  # the configuration of a preset


def choose(config: Train, vocab: int) -> Chosen:
    """Return the model of a configuration for a vocabulary."""
    given = config.model
    loss = gpt.next_token_loss if given.loss is None else function(given.loss, "--model.loss")
    if given.own is not None:
        return _own(config, vocab, loss)
    kind, _, name = given.preset.partition("-")
    name = given.preset if given.preset in llama.PRESETS else name
    changes: dict[str, Any] = {n: getattr(given, n) for n in SHAPE if getattr(given, n) is not None}
    if kind == "gpt" and name in gpt.PRESETS:
        changes |= {"dropout": given.dropout, "pad_vocab_to": ROUND_TO}
        shape = gpt.GPTConfig.preset(name, vocab=vocab, **changes)
        init = lambda rngs: gpt.GPT(shape, rngs=rngs)
    elif name in llama.PRESETS:
        changes |= _heads_of_keys(name, changes)
        rounded = math.ceil(vocab / ROUND_TO) * ROUND_TO
        shape = llama.LlamaConfig.preset(name, vocab=rounded, **changes)
        init = lambda rngs: llama.Llama(shape, rngs=rngs)
    else:
        raise ValueError(f"--model.preset {given.preset}: one of {', '.join(presets())}.")
    return Chosen(given.preset, init, loss, shape.vocab, shape.length, shape.length, shape)


def presets() -> list[str]:
    """Return the names of all presets."""
    of_llama = ["llama-tiny" if name == "tiny" else name for name in llama.PRESETS]
    return [*(f"gpt-{name}" for name in gpt.PRESETS), *of_llama]


def _heads_of_keys(name: str, changes: dict[str, Any]) -> dict[str, int]:
    """Return how many heads of keys a Llama has whose number of heads is changed."""
    was = llama.PRESETS[name]
    heads = changes.get("heads", was.heads)
    return {"kv_heads": max(heads * was.kv_heads // was.heads, 1)}


def _own(config: Train, vocab: int, loss: Callable) -> Chosen:
    name, length = str(config.model.own), config.model.length or 128
    make = function(name, "--model.own")
    if len(inspect.signature(make).parameters) != 2:
        raise ValueError(
            f"--model.own {name}: a function of (vocab, length) is expected, which returns "
            f"model_init(rngs); found {inspect.signature(make)}."
        )
    return Chosen(name, make(vocab, length), loss, vocab, length)


# -- mesh, strategy, optimizer ------------------------------------------------------------


def strategy_of(names: str) -> hfjax.Strategy:
    """Return the strategy named so: fsdp+tensor."""
    given = [name.strip().lower() for name in names.replace("|", "+").split("+")]
    for name in given:
        if name not in STRATEGIES:
            raise ValueError(
                f"--strategy {names}: no strategy {name!r}. Join some of {', '.join(STRATEGIES)} "
                "by +, for instance fsdp+tensor."
            )
    return reduce(lambda a, b: a | b, (getattr(hfjax, name.upper()) for name in given))


def mesh_of(config: Train) -> jax.sharding.Mesh:
    """Return the mesh; devices that are left go to fsdp if the strategy uses it, else to data."""
    given = config.mesh
    strategy = strategy_of(config.strategy)
    over_fsdp = any("fsdp" in axes for axes in strategy.parameters.values())
    free = "fsdp" if over_fsdp else "data"
    sizes = {"data": given.data, "fsdp": given.fsdp, "tensor": given.tensor, "pipe": given.pipe}
    if sizes[free] is None and -1 not in sizes.values():
        sizes[free] = -1
    return hfjax.make_mesh(**{axis: size for axis, size in sizes.items() if size is not None})


def optimizer_of(config: Train, rate: Callable) -> Any:
    """Return the optimizer of a configuration."""
    given = config.optimizer
    if given.own is not None:
        optimizer = function(given.own, "--optimizer.own")(rate)
    else:
        optimizer = _named(config, rate)
    optimizer = scaled(optimizer, dict(map(_factor, given.scale)))
    return optimizer if given.ema is None else hfjax.ema(optimizer, given.ema)


def _named(config: Train, rate: Callable) -> Any:
    given = config.optimizer
    make: Any = getattr(optax, given.name, None)
    names = inspect.signature(make).parameters if callable(make) else {}
    if make is None or "learning_rate" not in names:
        raise ValueError(
            f"--optimizer.name {given.name}: optax has no optimizer of a learning rate by this "
            "name. For instance adamw, lion, sgd, adafactor; or --optimizer.own file.py:function."
        )
    fields: dict[str, Any] = {}
    decays = {"weight_decay", "mask"} <= set(names)
    if given.weight_decay is not None and not decays:
        raise ValueError(
            f"--optimizer.weight-decay: {given.name} has none. Use adamw or lion, or leave it out."
        )
    if decays:
        decay = 0.1 if given.weight_decay is None else given.weight_decay
        fields = {"weight_decay": decay, "mask": _decayed(given.no_decay)}
    return make(learning_rate=rate, **fields)


def _decayed(no_decay: tuple[str, ...] | None) -> Callable:
    """Return the mask of what decays: all but these patterns; None: but biases and norms."""

    def mask(params: Any) -> Any:
        paths = flatten(params)
        patterns = list(NO_DECAY if no_decay is None else no_decay)
        if no_decay is None:
            patterns = [p for p in patterns if any(fnmatchcase(path, p) for path in paths)]
        kept = matches(patterns, paths)
        return nest({path: path not in kept for path in paths})

    return mask


def _factor(given: str) -> tuple[str, float]:
    pattern, _, factor = given.rpartition("=")
    try:
        if pattern:
            return pattern, float(factor)
    except ValueError:
        pass
    raise ValueError(f"--optimizer.scale {given}: PATTERN=FACTOR is expected, as in tokens=0.1.")
