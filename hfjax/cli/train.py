"""`hfjax train`, `hfjax eval` and `hfjax generate`.

`start` does what must come before the first use of JAX: devices, processes, the compilation cache.
"""

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import tyro

import hfjax
from hfjax.checkpoint import RestoredRun
from hfjax.cli.arguments import expand_short, parse_flags
from hfjax.cli.log_handler import log_handler
from hfjax.distributed.consensus import say, speaks
from hfjax.distributed.exit_codes import exit_code
from hfjax.distributed.init import Cluster, init_distributed
from hfjax.distributed.launcher import visible_gpus
from hfjax.distributed.stop import leaving
from hfjax.optimizers.transforms import averaged
from hfjax.parallel.param_specs import num_batch_shards
from hfjax.trainer import config_io
from hfjax.trainer.build import (
    RunComponents,
    check_flags_used,
)
from hfjax.trainer.config import MeshConfig, TrainConfig, check_bounds
from hfjax.trainer.deepspeed_flags import FILE, with_deepspeed_file
from hfjax.trainer.logs.console import show_waiting, validation_line
from hfjax.trainer.recipes import check_recipe_data, recipe_path
from hfjax.trainer.sampling import Sampling
from hfjax.trainer.source_snapshot import COPY
from hfjax.trainer.strategy import build_mesh
from hfjax.trainer.train_loop import CHECKPOINTS, CONFIG, train
from hfjax.utils.command_errors import report_errors
from hfjax.utils.read_files import MISSING, ORDINARY, path_kind
from hfjax.utils.renamed import OldNamesWarning
from hfjax.utils.tables import escape_controls, quote
from hfjax.utils.write_files import user_cache

RECIPE = "--recipe"


def start(config: TrainConfig) -> Cluster:
    """Set JAX up for a configuration; return the cluster of processes that run it."""
    if config.cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    enable_program_cache(config.compilation_cache)
    cluster = init_distributed(timeout=config.init_timeout)
    if not speaks():  # the first process reports skipped steps
        warnings.simplefilter("ignore", RuntimeWarning)
    return cluster


def enable_program_cache(folder: Path | None = None) -> None:
    """Keep compiled programs in a directory, so that a second start need not compile them."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") and folder is None:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder or user_cache() / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def train_command(argv: Sequence[str]) -> int:
    """Train; return the exit status."""
    with (
        leaving(),
        report_errors("train"),
    ):  # in every process: the others may not know of an error
        default, rest = config_of(argv)
        config = parse_flags(TrainConfig, rest, "train", default, config=True)
        check_flags_used([config], rest)
        check_recipe(argv, config)
        start(config)
        _check_cpu_devices(config, default)
        typed = expand_short(TrainConfig, rest)
        config, setup = with_deepspeed_file(config, typed, config.devices or jax.device_count())
        if setup is not None:
            say(str(setup))
        handler = log_handler()
        return exit_code(train(config, handler and handler.console).reason)


def _check_cpu_devices(config: TrainConfig, file: TrainConfig) -> None:
    """Warn of simulated devices in a configuration file on a machine with GPUs.

    Runs do not save them, but early versions did.
    """
    cpu_devices = file.cpu_devices
    if cpu_devices is None or config.cpu_devices != cpu_devices or not speaks():
        return
    if gpus := len(visible_gpus()):
        print(
            f"hfjax train: warning: the file of --config says cpu_devices: {cpu_devices}. This run "
            f"computes on simulated CPU devices, and not on the {gpus} GPUs of this machine. To "
            "use the GPUs, give --cpu-devices None.",
            file=sys.stderr,
            flush=True,
        )


def config_of(argv: Sequence[str]) -> tuple[TrainConfig, list[str]]:
    """Return the configuration of --config or --recipe, and the arguments that override it."""
    sources, rest = _split_sources(argv)
    if len(sources) > 1:
        flags = " and ".join(name for name, _ in sources)
        raise ValueError(f"{flags}: settings come from one file. Give one of the two.")
    for name, value in sources:
        return config_io.load(recipe_path(value) if name == RECIPE else value), rest
    return TrainConfig(), rest


def check_recipe(argv: Sequence[str], config: TrainConfig, vocab: int | None = None) -> None:
    """Refuse a recipe whose data is not there, unless only its vocabulary is needed and known."""
    for name, value in _split_sources(argv)[0]:
        if name == RECIPE and vocab is None:
            plans = hasattr(config, "vocab")
            check_recipe_data(value, config, "--vocab N" if plans else "--data.train DIR")


def _split_sources(argv: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the values of --config and --recipe, and the other arguments."""
    sources, rest, arguments = [], [], iter(argv)
    for arg in arguments:
        name, equals, value = arg.partition("=")
        if name not in (RECIPE, "--config"):
            rest.append(arg)
            continue
        value = value if equals else next(arguments, "")
        if not value:
            what = "recipe" if name == RECIPE else "file"
            raise ValueError(f"{name}: the name of a {what} is expected.")
        sources.append((name, value))
    return sources, rest


@dataclass(frozen=True)
class Saved:
    """A run of `hfjax train`, on the devices at hand."""

    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    step: int | None = None
    """Step of the checkpoint to load (default: the latest)."""
    average: bool = True
    """Use the average of the parameters, if the run keeps one (--optimizer.ema)."""
    mesh: MeshConfig = MeshConfig()
    """Sizes of the mesh's axes; -1: all remaining devices. A size other than 1 turns the axis's
    parallelism on. Without any: as in the run if that fits these devices, else replicated."""
    strategy: str | None = None
    """Your own table of sharding rules: file.py:name of a hfjax.Strategy (default: the run's)."""
    devices: int | None = None
    """Use only the first N devices (default: all)."""
    cpu_devices: int | None = None
    """Number of simulated CPU devices to run on (default: none, real devices)."""
    compilation_cache: Path | None = None
    """Folder of compiled programs (default: in the user's cache)."""
    base: str | None = None
    """Model under the run's adapters: folder or ORG/NAME (default: where it was in training)."""
    trust: bool = False
    """Run the Python code that the configuration of the run names."""


@dataclass(frozen=True)
class Evaluate(Saved):
    """Compute the mean loss of a trained model over a data set, each example once; of images also
    the accuracy, or the intersection over union by class."""

    data: str | None = None
    """Data set to evaluate on, as --data.valid (default: the run's validation set)."""
    batch_size: int | None = None
    """Examples in a batch, raised to what devices divide (default: as in training)."""
    max_batches: int | None = None
    """Maximum number of batches (default: all)."""

    def __post_init__(self):
        check_bounds(self, "", batch_size=1, max_batches=1)


@dataclass(frozen=True)
class Generate(Saved):
    """Write text with a trained model."""

    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to continue; for several repeat it, the seed grows by one (default: a line break)."""
    chat: bool = False
    """Ask each prompt by the model's chat template; write the answers."""
    tokens: int = 200
    """Number of tokens to write."""
    sampling: tyro.conf.OmitArgPrefixes[Sampling] = Sampling()


def evaluate_command(argv: Sequence[str]) -> int:
    """Evaluate a run; return the exit status."""
    with leaving(), report_errors("eval"):
        _evaluate(parse_flags(Evaluate, argv, "eval"))
    return 0


def _evaluate(args: Evaluate) -> None:
    config = saved_config(args)
    if args.data and (factory := config.data.factory):
        raise ValueError(
            f"--data {quote(args.data)}: {quote(args.run)} has its data from --data.factory "
            f"{factory}, which makes its validation set too. Leave it out."
        )
    data = replace(config.data, valid=args.data) if args.data else config.data
    config = replace(
        config, data=data, global_batch_size=args.batch_size or config.global_batch_size
    )
    run, restored = saved_state(args, config)
    if run.valid is None:
        raise ValueError(f"{quote(args.run)} has no validation set. Give one: --data DIR.")
    with show_waiting("compiling and evaluating"):
        run.check_validation(restored.state, args.max_batches)
        evaluation = run.validated(restored.state, args.max_batches)
    lines = [
        validation_line(restored.step, evaluation.line),
        evaluation.table,
        *run.task.closing_lines(run.valid),
    ]
    say("\n".join(filter(None, lines)))


def generate_command(argv: Sequence[str]) -> int:
    """Write text; return the exit status."""
    with leaving(), report_errors("generate"):
        args: Generate = parse_flags(Generate, argv, "generate")
        run, restored = saved_state(args, saved_config(args))
        write = run.answered if args.chat else run.written
        with show_waiting("compiling and writing"):
            texts = [
                write(restored.state, prompt, args.tokens, args.sampling.for_prompt(number))
                for number, prompt in enumerate(args.prompt or ("\n",))
            ]
        text = "\n\n".join(texts)
        say(escape_controls(text) if sys.stdout.isatty() else text)
    return 0


def saved_config(args: Saved) -> TrainConfig:
    """Return the configuration of a saved run, on the available devices."""
    path = args.run / CONFIG
    if (kind := path_kind(path)) != ORDINARY:
        problem = f"it has no {CONFIG}" if kind == MISSING else f"its {CONFIG} is {kind}"
        raise ValueError(f"{quote(args.run)} is no run of hfjax train: {problem}.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OldNamesWarning)
        config = config_io.load(path)
    if (code := config_io.code_flags(config)) and not args.trust:
        raise ValueError(
            f"{quote(path)} names Python code, {' and '.join(code)}, which would run as you. If "
            "you wrote it or have read it, give --trust."
        )
    overrides: dict[str, Any] = {
        name: getattr(args, name) for name in ("devices", "cpu_devices", "compilation_cache")
    }
    if config.deepspeed is not None:
        overrides["deepspeed"] = args.run / FILE
    if args.base is not None and config.lora.rank is None:
        raise ValueError(
            f"--base {args.base}: {quote(args.run)} has no adapters, and its checkpoints hold the "
            "whole model. Leave it out."
        )
    if config.model.pretrained is not None:
        has_copy = config.lora.rank is None  # else the weights are needed, too
        source = str(args.run / COPY) if has_copy else args.base or config.model.pretrained
        overrides["model"] = replace(config.model, pretrained=source)
    return replace(config, **overrides)


def saved_state(
    args: Saved, config: TrainConfig, master: bool = False
) -> tuple[RunComponents, RestoredRun]:
    """Return the components of a run and its state.

    Without an average, and unless master weights are asked for, only parameters are read; the state
    is that of the checkpoint's step, since an export counts steps.
    """
    start(config)
    averages = args.average and config.optimizer.ema is not None
    folder = args.run / CHECKPOINTS
    with show_waiting("reading the checkpoint"):
        run = _build_run(args, config, averages or master)
        if not (averages or master):
            checkpoint = hfjax.restore(folder, run.layout, args.step, parameters_only=True)
            state = replace(checkpoint.state, step=checkpoint.state.step + checkpoint.step)
            return run, replace(checkpoint, state=state)
        restored = hfjax.restore(folder, run.layout, args.step)
        state = averaged(restored.state) if averages else restored.state
        return run, replace(restored, state=state)


def _build_run(args: Saved, config: TrainConfig, trains: bool) -> RunComponents:
    """Return the components of a run in its own layout, or one that these devices allow."""
    make = lambda config: RunComponents(_pad_batch(config), trains=trains)
    if not trains:
        config = replace(config, offload=replace(config.offload, optimizer=False))
    if args.strategy is not None:
        own = {"strategy": args.strategy, "zero": None, "sequence_parallel": True}
        return make(replace(config, mesh=args.mesh, **own))
    if args.mesh != MeshConfig():
        shards = config.sequence_parallel or args.mesh.is_on("row")
        return make(replace(config, zero=None, mesh=args.mesh, sequence_parallel=shards))
    is_single_device = (config.devices or jax.device_count()) == 1
    reason = ""
    for mesh in () if is_single_device else _meshes(config.mesh):
        try:
            run = make(replace(config, mesh=mesh))
            _ = run.evaluate
            return run
        except ValueError as wrong:  # tried without it below, which reports any other mistake
            reason = reason or str(wrong)
    if reason:
        warning = f"parameters are replicated, since the run's mesh does not fit: {reason}"
        print(f"hfjax: {warning}", file=sys.stderr, flush=True)
    return make(replace(config, strategy=None, zero=None, mesh=MeshConfig()))


def _meshes(mesh: MeshConfig) -> Iterator[MeshConfig]:
    """Yield the mesh of a run, and one of the same kind for another number of devices.

    >>> [mesh.flags for mesh in _meshes(MeshConfig(data=2, fsdp=4))]
    ['--mesh.data 2 --mesh.fsdp 4', '--mesh.fsdp -1']
    """
    yield mesh
    axes = [axis for axis in ("fsdp", "tensor", "context", "expert", "pipe") if mesh.is_on(axis)]
    if axes[:1] == ["fsdp"] or len(axes) == 1:
        yield MeshConfig(**{axes[0]: -1})


def _pad_batch(config: TrainConfig) -> TrainConfig:
    """Return the configuration with batches that divide by the devices; the last is padded."""
    batch_shards = num_batch_shards(build_mesh(config))
    return replace(
        config, global_batch_size=-(-config.global_batch_size // batch_shards) * batch_shards
    )
