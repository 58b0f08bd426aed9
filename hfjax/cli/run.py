"""`hfjax train`, `hfjax eval` and `hfjax generate`.

`start` does what must come before the first use of JAX: devices, processes, the program cache.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import tyro

import hfjax
from hfjax.checkpoint import Restored
from hfjax.cli.arguments import parsed
from hfjax.distributed.consensus import say, speaks
from hfjax.distributed.exit_codes import exit_code
from hfjax.distributed.init import Cluster, init_distributed
from hfjax.distributed.launcher import visible_gpus
from hfjax.distributed.stop import leaving
from hfjax.optimizers.transforms import averaged
from hfjax.parallel.param_specs import row_shares
from hfjax.trainer import config_io
from hfjax.trainer.build import Parts, check_used, mesh_of, whole, without_optimizer
from hfjax.trainer.config import Mesh, Train, at_least
from hfjax.trainer.console import validation, waiting
from hfjax.trainer.deepspeed_flags import FILE, with_file
from hfjax.trainer.sampling import Sampling
from hfjax.trainer.source_snapshot import COPY
from hfjax.trainer.train_loop import CHECKPOINTS, CONFIG, train
from hfjax.utils.command_errors import ending_in_words
from hfjax.utils.read_files import MISSING, ORDINARY, what_is
from hfjax.utils.tables import harmless, named
from hfjax.utils.write_files import user_cache


def start(config: Train) -> Cluster:
    """Set JAX up as a configuration says; return the processes that run it."""
    if config.cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    keep_programs(config.cache)
    cluster = init_distributed(timeout=config.init_timeout)
    if not speaks():  # the first process tells of skipped steps
        warnings.simplefilter("ignore", RuntimeWarning)
    return cluster


def keep_programs(place: Path | None = None) -> None:
    """Keep compiled programs in a directory, so that a second start need not compile them."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") and place is None:
        return
    jax.config.update("jax_compilation_cache_dir", str(place or user_cache() / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def train_command(argv: Sequence[str]) -> int:
    """Train; return the exit status."""
    with (
        leaving(),
        ending_in_words("train"),
    ):  # in every process: the other ones may know of nothing
        default, rest = config_of(argv)
        config = parsed(Train, rest, "train", default, config=True)
        check_used([config], rest)
        start(config)
        _check_cpu_devices(config, default)
        config, setup = with_file(config, rest, config.devices or jax.device_count())
        if setup is not None:
            say(str(setup))
        return exit_code(train(config).reason)


def _check_cpu_devices(config: Train, file: Train) -> None:
    """Warn of simulated devices that a configuration file asks for where there are GPUs.

    Runs do not save them, but early versions did.
    """
    asked = file.cpu_devices
    if asked is None or config.cpu_devices != asked or not speaks():
        return
    if gpus := len(visible_gpus()):
        print(
            f"hfjax train: warning: the file of --config says cpu_devices: {asked}. This run "
            f"computes on simulated CPU devices, and not on the {gpus} GPUs of this machine. To "
            "use the GPUs, give --cpu-devices None.",
            file=sys.stderr,
            flush=True,
        )


def config_of(argv: Sequence[str]) -> tuple[Train, list[str]]:
    """Return what --config says, and the other arguments: they have the last word."""
    rest = list(argv)
    for at, word in enumerate(rest):
        name, equals, value = word.partition("=")
        if name == "--config":
            if not equals and at + 1 == len(rest):
                raise ValueError("--config: the name of a file is expected.")
            path = value if equals else rest[at + 1]
            left = rest[:at] + rest[at + (1 if equals else 2) :]
            if any(word.partition("=")[0] == name for word in left):
                raise ValueError("--config is there twice: give one file.")
            return config_io.load(path), left
    return Train(), rest


@dataclass(frozen=True)
class Saved:
    """A run of `hfjax train`, on the devices at hand."""

    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    step: int | None = None
    """Step of the checkpoint to load (default: the latest)."""
    average: bool = True
    """Use the average of the parameters, if the run keeps one (--optimizer.ema)."""
    strategy: str | None = None
    """Strategy: {strategies}, joined by + (default: the run's if it fits, else ddp)."""
    mesh: Mesh = Mesh()
    """Sizes of the mesh's axes; -1: all remaining devices. Without any: as in the run, if that fits
    these devices."""
    devices: int | None = None
    """Use only the first N devices (default: all)."""
    cpu_devices: int | None = None
    """Number of simulated CPU devices to run on (default: none, real devices)."""
    cache: Path | None = None
    """Folder of compiled programs (default: in the user's cache)."""
    trust: bool = False
    """Run the Python code that the configuration of the run names."""


@dataclass(frozen=True)
class Evaluate(Saved):
    """Compute the mean loss of a trained model over a data set, each example once; of images also
    the accuracy, or the intersection over union by class."""

    data: Path | None = None
    """Data set to evaluate on (default: the run's validation set)."""
    batch: int | None = None
    """Examples in a batch, raised to what devices divide (default: as in training)."""
    batches: int | None = None
    """Maximum number of batches (default: all)."""

    def __post_init__(self):
        at_least(self, "", batch=1, batches=1)


@dataclass(frozen=True)
class Generate(Saved):
    """Write text with a trained model."""

    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to continue; for several repeat it, the seed grows by one (default: a line break)."""
    tokens: int = 200
    """Number of tokens to write."""
    sampling: tyro.conf.OmitArgPrefixes[Sampling] = Sampling()


def evaluate_command(argv: Sequence[str]) -> int:
    """Evaluate a run; return the exit status."""
    with leaving(), ending_in_words("eval"):
        _evaluate(parsed(Evaluate, argv, "eval"))
    return 0


def _evaluate(given: Evaluate) -> None:
    config = saved_config(given)
    data = replace(config.data, valid=str(given.data)) if given.data else config.data
    config = replace(config, data=data, batch=given.batch or config.batch)
    parts, restored = saved_state(given, config)
    if parts.valid is None:
        raise ValueError(f"{named(given.run)} has no validation set. Give one: --data DIR.")
    with waiting("compiling and evaluating"):
        parts.check_validation(restored.state, given.batches)
        found = parts.validated(restored.state, given.batches)
    told = [validation(restored.step, found.line), found.table, *parts.task.after(parts.valid)]
    say("\n".join(filter(None, told)))


def generate_command(argv: Sequence[str]) -> int:
    """Write text; return the exit status."""
    with leaving(), ending_in_words("generate"):
        given: Generate = parsed(Generate, argv, "generate")
        parts, restored = saved_state(given, saved_config(given))
        with waiting("compiling and writing"):
            texts = [
                parts.written(restored.state, prompt, given.tokens, given.sampling.later(number))
                for number, prompt in enumerate(given.prompt or ("\n",))
            ]
        text = "\n\n".join(texts)
        say(harmless(text) if sys.stdout.isatty() else text)
    return 0


def saved_config(given: Saved) -> Train:
    """Return the configuration of a saved run on the devices at hand."""
    path = given.run / CONFIG
    if (kind := what_is(path)) != ORDINARY:
        found = f"it has no {CONFIG}" if kind == MISSING else f"its {CONFIG} is {kind}"
        raise ValueError(f"{named(given.run)} is no run of hfjax train: {found}.")
    config = config_io.load(path)
    if (code := config_io.code_of(config)) and not given.trust:
        raise ValueError(
            f"{named(path)} names Python code, {' and '.join(code)}, which would run as you. If "
            "you wrote it or have read it, give --trust."
        )
    here: dict[str, Any] = {
        name: getattr(given, name) for name in ("devices", "cpu_devices", "cache")
    }
    if config.deepspeed is not None:
        here["deepspeed"] = given.run / FILE
    if config.model.pretrained is not None:
        here["model"] = replace(config.model, pretrained=given.run / COPY)
    return replace(config, **here)


def saved_state(given: Saved, config: Train, master: bool = False) -> tuple[Parts, Restored]:
    """Return the parts of a run and its state.

    Without an average, and unless master weights are asked for, only parameters are read; the state
    is that of the checkpoint's step, as what is exported counts steps.
    """
    start(config)
    averages = given.average and config.optimizer.ema is not None
    place = given.run / CHECKPOINTS
    with waiting("reading the checkpoint"):
        parts = _laid_out(given, config, averages or master)
        if not (averages or master):
            found = hfjax.restore(place, parts.layout, given.step, parameters_only=True)
            state = replace(found.state, step=found.state.step + found.step)
            return parts, replace(found, state=state)
        restored = hfjax.restore(place, parts.layout, given.step)
        state = averaged(restored.state) if averages else restored.state
        return parts, replace(restored, state=state)


def _laid_out(given: Saved, config: Train, trains: bool) -> Parts:
    """Return the parts of a run as it was laid out, or as the devices at hand allow."""
    make = lambda config: Parts(_dividing(config), trains=trains)
    if given.strategy is not None:
        return make(replace(config, strategy=given.strategy, mesh=given.mesh))
    own = config.strategy if trains else without_optimizer(config.strategy)
    meshes = (config.mesh, Mesh()) if given.mesh == Mesh() else (given.mesh,)
    alone = (config.devices or jax.device_count()) == 1
    for mesh in () if alone else meshes:
        try:
            parts = make(replace(config, strategy=own, mesh=mesh))
            _ = parts.evaluate
            return parts
        except ValueError:  # tried without it below, where another mistake is told
            continue
    plain = replace(config, strategy=whole(own), mesh=given.mesh)
    if not alone:
        told = f"--strategy {own} of the run does not fit these devices: {plain.strategy} is taken."
        print(f"hfjax: {told}", file=sys.stderr, flush=True)
    return make(plain)


def _dividing(config: Train) -> Train:
    """Return the configuration with batches that divide by the devices: the last one is filled."""
    shares = row_shares(mesh_of(config))
    return replace(config, batch=-(-config.batch // shares) * shares)
