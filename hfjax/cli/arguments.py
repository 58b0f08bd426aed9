"""Parses command lines, and writes their --help.

The help of a flag is the text below its field, with three rules (`_flag`): a name in braces stands
for a table of the code (`CHOICES`); "(default: …)" at the end says what no value means; and the
full stop at the end is left out.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro
from tyro._docstrings import get_field_docstring
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from hfjax.utils.command_errors import import_or_explain
from hfjax.utils.keywords import closest
from hfjax.utils.renamed import CONFIG_KEYS, OLD_FLAGS

# What replaces {name} in a text: the keys of a table, or what a function returns.
CHOICES = {
    "schedules": "hfjax.parallel.schedules.named:SCHEDULES",
    "presets": "hfjax.trainer.model:presets",
    "image_presets": "hfjax.models.vision.preset_table:PRESETS",
    "precisions": "hfjax.parallel.precision.dtypes:PRECISIONS",
    "recipes": "hfjax.trainer.recipes:recipe_files",
    "remats": "hfjax.parallel.remat:WHAT",
    "gpus": "hfjax.hardware.machine:MACHINES",
}
LEFT_OUT = {"schedules": ("forward",)}  # a run refuses it: it has no backward passes

# Flags that few need, behind the others of their box in this order; then boxes, in theirs.
RARE = (
    *("factory", "loss", "deepspeed", "strategy", "devices", "cpu_devices", "profile"),
    *("max_runtime", "compilation_cache", "watchdog_timeout", "init_timeout", "on_nonfinite"),
    *("gradient_reduction", "tensor_overlap_chunks", "dispatch", "param_dtype"),
    *("num_experts", "top_k", "capacity_factor", "expert", "row"),
)
BOXES = (
    *("sampling", "mesh", "pipeline", "model", "data", "lora", "optimizer", "lr_schedule"),
    *("checkpoint", "eval", "log", "offload"),
)
CONFIG = "Take settings from a .yaml file, or from `config` of a .py file (default: none)"
RECIPE = "Take settings from a recipe: {recipes} (default: none)"
NO_VALUE = re.compile(r"\s*\(default: (?P<what>.*)\)$", re.DOTALL)


class InvalidFlagsError(Exception):
    """What a dataclass of flags refuses; of a ValueError tyro draws a box."""


def parse_flags(
    kind: type, argv: Sequence[str], command: str, default: Any = None, config: bool = False
) -> Any:
    """Return the settings in the arguments of `hfjax COMMAND`.

    Args:
        kind: The dataclass of its flags.
        argv: The arguments.
        command: Its name.
        default: The defaults of flags that are not given.
        config: Whether it takes --config and --recipe; `config_of` has removed them from `argv`.
    """
    argv = expand_short(kind, argv)
    check_values(argv)
    check_known(kind, argv, config)
    check_once(kind, argv)
    fields = {} if default is None else {"default": default}
    registry = ConstructorRegistry()
    registry.struct_rule(lambda info: _struct_spec(info, kind if config else None))
    try:
        with registry:
            return tyro.cli(kind, args=list(argv), prog=f"hfjax {command}", **fields)
    except InvalidFlagsError as wrong:
        raise ValueError(str(wrong)) from None


# -- --help -------------------------------------------------------------------------------


def choices(name: str) -> tuple[str, ...]:
    """Return the choices that a table of the code has.

    >>> choices("remats")
    ('none', 'dots', 'full', 'except_last')
    """
    module, _, attribute = CHOICES[name].partition(":")
    table = getattr(import_or_explain(module, "hfjax"), attribute)
    options: Any = table() if callable(table) else table
    return tuple(option for option in options if option not in LEFT_OUT.get(name, ()))


def _struct_spec(info: StructTypeInfo, takes_config: type | None) -> StructConstructorSpec | None:
    """Return the flags of a dataclass, in order and with their help."""
    kind, defaults = info.type, info.default
    if not (is_dataclass(kind) and kind.__module__.startswith("hfjax.")):
        return None
    hints, specs = get_type_hints(kind, include_extras=True), []
    for field in sorted(
        _fields(kind), key=lambda field: _flag_order(field.name, hints[field.name])
    ):
        usual = _default(field)
        value = getattr(defaults, field.name) if isinstance(defaults, kind) else usual
        hint, text = hints[field.name], get_field_docstring(kind, field.name, ()) or ""
        if _is_box(hint):
            specs.append(StructFieldSpec(field.name, hint, value, text or None))
        else:
            specs.append(StructFieldSpec(field.name, _flag(hint, text, usual), value))
    if kind is takes_config:
        specs.insert(0, StructFieldSpec("config", _flag(Path | None, CONFIG, None), None))
        specs.insert(1, StructFieldSpec("recipe", _flag(str | None, RECIPE, None), None))

    def build(config: Any = None, recipe: Any = None, **values: Any) -> Any:
        try:
            return kind(**values)
        except ValueError as wrong:
            raise InvalidFlagsError(wrong) from None

    build.__doc__ = inspect.getdoc(kind)  # --help begins with it
    return StructConstructorSpec(build, tuple(specs))


def _flag(hint: Any, text: str, usual: Any) -> Any:
    """Return the type of a flag together with its help.

    Args:
        hint: The type.
        text: The text below its field.
        usual: Its default; None is not shown as a value if it is the default.
    """
    text = text.removesuffix(".")
    empty = NO_VALUE.search(text)
    empty_text = empty["what"] if empty else "none"
    text = NO_VALUE.sub("", text)
    for name in re.findall(r"\{(\w+)\}", text):
        text = text.replace(f"{{{name}}}", ", ".join(choices(name)))
    show_default: Callable[[str], str] = lambda value: (
        f"(default: {empty_text if value in ('None', '') else value})"
    )
    annotation: Any = tyro.conf.arg(
        help=text or None, help_behavior_hint=show_default, metavar=_metavar(hint, usual)
    )
    return Annotated[hint, annotation]


def _metavar(hint: Any, usual: Any) -> str | None:
    """Return how the value of an optional flag is written; None: of another flag."""
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    kinds = [kind for kind in get_args(bare) if kind is not type(None)]
    if len(kinds) != 1 or type(None) not in get_args(bare):
        return None
    return _value(kinds[0]) if usual is None else f"{_value(kinds[0])}|None"


def _value(kind: Any) -> str:
    """Return how a value of a type is written, as tyro writes it.

    >>> _value(int), _value(tuple[str, ...]), _value(tuple[float, float])
    ('INT', '[STR [STR ...]]', 'FLOAT FLOAT')
    """
    of = get_args(kind)
    if get_origin(kind) is Literal:
        return f"{{{','.join(map(str, of))}}}"
    if get_origin(kind) is not tuple:
        return kind.__name__.upper()
    return f"[{_value(of[0])} [{_value(of[0])} ...]]" if ... in of else " ".join(map(_value, of))


def _fields(kind: Any) -> list[dataclasses.Field]:
    """Return the fields of a dataclass: its own before inherited ones."""
    of = lambda field: next(
        number for number, owner in enumerate(kind.__mro__) if field.name in owner.__annotations__
    )
    return sorted(filter(partial(_is_flag, kind), dataclasses.fields(kind)), key=of)


def _is_flag(kind: Any, field: dataclasses.Field) -> bool:
    """Return whether a field is a flag: its class may hide others."""
    return field.init and field.name not in getattr(kind, "hidden", ())


def _flag_order(name: str, hint: Any) -> tuple[int, int]:
    """Return the sort key of a flag, or of a box of flags."""
    if _is_box(hint):
        return 2, BOXES.index(name) if name in BOXES else len(BOXES)
    return (1, RARE.index(name)) if name in RARE else (0, 0)


def _is_box(hint: Any) -> bool:
    return is_dataclass(get_args(hint)[0] if get_origin(hint) is Annotated else hint)


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    factory = field.default_factory
    return tyro.MISSING if factory is dataclasses.MISSING else factory()


# -- what is refused ----------------------------------------------------------------------


def check_values(argv: Sequence[str]) -> None:
    """Refuse a flag with an empty value: an empty path would be the current folder.

    >>> check_values(["--steps", "3", "--run-dir="])
    Traceback (most recent call last):
    ValueError: --run-dir: its value is empty. Give one, or leave the flag out.
    """
    for before, arg in zip(["an argument", *argv], argv, strict=False):
        name, equals, value = arg.partition("=")
        if not arg or (name.startswith("--") and equals and not value):
            raise ValueError(
                f"{name or before}: its value is empty. Give one, or leave the flag out."
            )


def check_once(kind: type, argv: Sequence[str]) -> None:
    """Refuse a flag of several values that is given twice: only the last ones would count."""
    flags = [arg.partition("=")[0].replace("_", "-") for arg in argv if arg.startswith("--")]
    for name, hint, marks in _flag_types(kind):
        several = any(get_origin(option) is tuple for option in (hint, *get_args(hint)))
        if several and not marks and flags.count(flag := f"--{name}") > 1:
            raise ValueError(
                f"{flag} is there twice, and only its last values would count. Give it once, "
                f"all values behind it: {flag} ONE ANOTHER."
            )


SHORT = {"lr": "optimizer.learning-rate"}  # short names of flags

# Name of a flag in other libraries -> its name here, if a command has it.
ALIASES = {
    name: flag
    for flag, names in {
        "optimizer.learning-rate": "learning-rate optimizer.lr lr-scheduler.lr",
        "optimizer.name": "opt-type optimizer optimizer-name",
        "optimizer.weight-decay": "wd weight-decay adam-weight-decay",
        "optimizer.max-grad-norm": "clip-grad gradient-clipping gradient-clipping-threshold "
        "max-norm training.max-norm max-grad-norm",
        "lr-schedule.warmup-steps": "warmup lr-warmup-iters lr-scheduler.warmup-steps warmup-steps",
        "lr-schedule.type": "lr-decay-style lr-scheduler-type lr-scheduler.decay-type",
        "lr-schedule.final-fraction": "min-lr cosine-learning-rate-final-fraction "
        "lr-scheduler.min-lr-factor",
        "global-batch-size": "batch-size bs train-batch-size micro-batch-size "
        "per-device-batch-size training.local-batch-size training.global-batch-size",
        "gradient-accumulation-steps": "accumulate-grad-batches grad-accum",
        "steps": "max-steps num-steps train-steps train-iters iters training.steps",
        "data.epochs": "epochs num-epochs num-train-epochs",
        "data.train": "dataset train-data data-path dataset-path training.dataset",
        "model.preset": "model-name model model.name",
        "model.seq-len": "seq-len seq-length max-length context-length max-target-length "
        "training.seq-len",
        "model.num-layers": "num-layers base-num-decoder-layers",
        "model.num-heads": "num-attention-heads base-num-query-heads",
        "model.num-kv-heads": "num-query-groups base-num-kv-heads",
        "model.hidden-size": "hidden-size base-emb-dim",
        "model.intermediate-size": "ffn-hidden-size base-mlp-dim",
        "model.num-experts": "num-experts",
        "model.top-k": "moe-router-topk num-experts-per-tok",
        "mesh.data": "data-parallel-size dp ici-data-parallelism "
        "parallelism.data-parallel-replicate-degree",
        "mesh.fsdp": "ici-fsdp-parallelism fsdp use-fsdp "
        "parallelism.data-parallel-shard-degree data-parallel-shard-degree",
        "mesh.tensor": "tensor-model-parallel-size tensor-parallel-size tp "
        "ici-tensor-parallelism tensor-parallel-degree parallelism.tensor-parallel-degree",
        "mesh.pipe": "pipeline-model-parallel-size pp ici-pipeline-parallelism "
        "pipeline-parallel-degree parallelism.pipeline-parallel-degree",
        "mesh.context": "context-parallel-size cp ici-context-parallelism "
        "context-parallel-degree parallelism.context-parallel-degree",
        "mesh.expert": "expert-model-parallel-size ep ici-expert-parallelism "
        "expert-parallel-degree parallelism.expert-parallel-degree",
        "zero": "use-distributed-optimizer zero-stage",
        "sequence-parallel": "enable-sequence-parallel",
        "pipeline.chunks": "num-layers-per-virtual-pipeline-stage",
        "remat": "recompute-granularity recompute-activations remat-policy "
        "activation-checkpoint.mode",
        "precision": "dtype bf16 fp16",
        "master-weights": "weight-dtype",
        "offload.optimizer": "optimizer-cpu-offload optimizer-memory-host-offload",
        "checkpoint.interval": "save-interval save-steps checkpoint-period checkpoint-interval",
        "checkpoint.keep-latest": "save-total-limit max-num-checkpoints-to-keep "
        "checkpoint.keep-latest-k",
        "checkpoint.init-from": "load load-parameters-path",
        "eval.interval": "eval-interval eval-steps validation.freq",
        "eval.max-batches": "eval-iters validation.steps",
        "log.interval": "log-interval logging-steps log-period metrics.log-freq",
        "run-dir": "output-dir output o save base-output-directory run-name job.dump-folder",
        "count": "gpus num-gpus nproc-per-node",
        "processes": "nproc-per-node nproc",
    }.items()
    for name in names.split()
}


def check_known(kind: type, argv: Sequence[str], config: bool = False) -> None:
    """Refuse a flag that a command does not have, and suggest the nearest one.

    Args:
        kind: The dataclass of its flags.
        argv: The arguments.
        config: Whether it takes --config.
    """
    known = [*flags_of(kind), "help", *(["config", "recipe"] if config else [])]
    for arg in argv:
        if not arg.startswith("--") or arg == "--":
            continue
        name = arg.partition("=")[0].removeprefix("--").replace("_", "-")
        if name in known:
            continue
        if current := [flag for flag in _current_names(name) if flag in known]:
            raise ValueError(f"--{name} is --{current[0]} now.")
        raise ValueError(f"--{name}: there is no such flag.{_suggestion(name, known)}")


def _current_names(name: str) -> tuple[str, ...]:
    """Return what an old flag may be now.

    >>> _current_names("optimizer.rate"), _current_names("optimizer.no-master")
    (('optimizer.learning-rate',), ('no-master-weights',))
    """
    head, dot, last = name.rpartition(".")
    is_off = last.startswith("no-")
    new = CONFIG_KEYS.get(f"{head}{dot}{last.removeprefix('no-')}".replace("-", "_"), "")
    if is_off and new:
        head, dot, last = new.rpartition(".")
        new = f"{head}{dot}no_{last}"
    return (*([new.replace("_", "-")] if new else []), *OLD_FLAGS.get(name, ()))


def expand_short(kind: type, argv: Sequence[str]) -> list[str]:
    """Return arguments with full names of flags, where the command has them."""
    known = set(flags_of(kind))
    full = {f"--{short}": f"--{flag}" for short, flag in SHORT.items() if flag in known}
    parts = [arg.partition("=") for arg in argv]
    typed = {flag for flag, _, _ in parts}
    for short, flag in full.items():
        if {short, flag} <= typed:
            raise ValueError(f"{short} beside {flag}: it is the same flag. Give it once.")
    return [full.get(flag, flag) + equals + value for flag, equals, value in parts]


def _suggestion(name: str, known: Sequence[str]) -> str:
    """Return what to give in place of an unknown flag."""
    inside = [f"--{flag}" for flag in known if flag.startswith(f"{name}.")]
    if inside:
        return f" Give one of these, with its value: {', '.join(inside)}."
    ends = [flag for flag in known if flag.rpartition(".")[2] == name]
    near = [ALIASES[name]] if ALIASES.get(name) in known else ends
    lasts = {flag.rpartition(".")[2]: flag for flag in reversed(known)}  # without their box
    last = closest(name.rpartition(".")[2], lasts)
    near = near or [
        candidate for candidate in (closest(name, known) or lasts.get(last),) if candidate
    ]
    mean = f" Did you mean {' or '.join(f'--{flag}' for flag in near)}?" if near else ""
    return f"{mean} --help lists all flags."


def flags_of(kind: type, prefix: str = "") -> Iterator[str]:
    """Yield the flags of a dataclass without their dashes, including the negated ones.

    >>> from hfjax.trainer.config import MeshConfig
    >>> list(flags_of(MeshConfig, "mesh."))[:2]
    ['mesh.data', 'mesh.fsdp']
    """
    for name, hint, _ in _flag_types(kind, prefix):
        yield name
        if hint is bool:
            head, dot, last = name.rpartition(".")
            yield f"{head}{dot}no-{last}"


def _flag_types(kind: type, prefix: str = "") -> Iterator[tuple[str, Any, Sequence[Any]]]:
    """Yield each flag of a dataclass, without its dashes, its type and its metadata."""
    hints = get_type_hints(kind, include_extras=True)
    for field in filter(partial(_is_flag, kind), dataclasses.fields(kind)):
        hint, name = hints[field.name], field.name.replace("_", "-")
        bare, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if is_dataclass(bare) and isinstance(bare, type):
            is_flat = tyro.conf.OmitArgPrefixes in marks
            yield from _flag_types(bare, prefix if is_flat else f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", bare, marks
