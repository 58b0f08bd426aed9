"""Pages of the reference, made from the code: names, presets, what combines, exit codes, versions.

A public name that no page has is an error (tests/test_site.py), as is a page without its names.
"""

import importlib
import inspect
import itertools
import tomllib
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path

import jax

from docs.site.flags import help_of
from hfjax.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]

API = {  # page: (its title, {heading: public names, module:name})
    "api_step": (
        "API: mesh, layout, step",
        {
            "Mesh": ["hfjax:make_mesh", "hfjax:cube", "hfjax:grid_2d", "hfjax:best_grid"],
            "Strategies": [
                "hfjax:Strategy",
                *(f"hfjax:{name}" for name in ("DDP", "ZERO1", "ZERO2", "ZERO3", "FSDP", "HSDP")),
                *("hfjax:TENSOR", "hfjax:SEQUENCE", "hfjax:GRID", "hfjax:CONTEXT"),
                *("hfjax:EXPERT", "hfjax:PIPE", "hfjax:HOST_OPTIMIZER", "hfjax:HOST_PARAMETERS"),
            ],
            "Layout and state": [
                *("hfjax:layout", "hfjax:Layout", "hfjax:init", "hfjax:State", "hfjax:full_array"),
                *("hfjax:to_model_order", "hfjax:to_model", "hfjax:merge"),
            ],
            "Steps": [
                *("hfjax:train_step", "hfjax.step.train_step:TrainStep", "hfjax:eval_step"),
                *("hfjax:predict_step", "hfjax:Gradients", "hfjax:Mean", "hfjax:Execution"),
            ],
            "Batches": ["hfjax:shard_batch", "hfjax:process_batch_slice"],
            "Choices of a step": [
                *("hfjax:Precision", "hfjax:PrecisionByPath", "hfjax:LossScale", "hfjax:Remat"),
                *("hfjax:Offload", "hfjax:offload", "hfjax:Schedule", "hfjax:ContextParallel"),
            ],
            "Rows that meet": ["hfjax:per_device", "hfjax:gather_batch"],
        },
    ),
    "api_models": (
        "API: models and optimizers",
        {
            "GPT and Llama": [
                *("hfjax.models.gpt:GPT", "hfjax.models.gpt:GPTConfig"),
                *("hfjax.models.gpt:next_token_loss", "hfjax.models.llama:Llama"),
                "hfjax.models.llama:LlamaConfig",
            ],
            "Mixtures of experts": [
                *("hfjax.models.moe:MoE", "hfjax.models.moe:Router", "hfjax.models.moe:MoELlama"),
                *(
                    "hfjax.models.moe:MoEConfig",
                    "hfjax.models.moe:RoutedOutputs",
                    "hfjax.models.moe:RouterMetrics",
                ),
                *("hfjax.models.moe:after_step", "hfjax.models.moe:next_token_loss"),
                *("hfjax.models.moe:over_batch", "hfjax.models.moe:uses_router_metrics"),
                "hfjax.models.moe:with_routing",
            ],
            "Parts of models": [
                *("hfjax.models.layers:stack_layers", "hfjax.models.layers:Dropout"),
                *("hfjax.models.layers:NoConstraint", "hfjax.models.layers:LocalOps"),
            ],
            "Images": [
                *("hfjax.models.vision.resnet:ResNet", "hfjax.models.vision.resnet:ResNetConfig"),
                *("hfjax.models.vision.regnet:RegNet", "hfjax.models.vision.regnet:RegNetConfig"),
                "hfjax.models.vision.deeplab:DeepLab",
                *("hfjax.models.vision.deeplab:DeepLabConfig", "hfjax.models.vision.vit:ViT"),
                "hfjax.models.vision.vit:ViTConfig",
            ],
            "Pretrained weights": ["hfjax:pretrained", "hfjax:export"],
            "Adapters": [
                *("hfjax.adapters:lora", "hfjax.adapters:Lora", "hfjax.adapters:load_adapter"),
                "hfjax.adapters:export_adapter",
            ],
            "Optimizers": [
                *(
                    "hfjax:adamw",
                    "hfjax.optimizers:by_path",
                    "hfjax.optimizers:matching",
                    "hfjax.optimizers:muon",
                    "hfjax.optimizers:scaled",
                    "hfjax:lr_schedule",
                ),
                *(
                    "hfjax.optimizers:ema",
                    "hfjax.optimizers:averaged",
                    "hfjax.optimizers:master_weights",
                ),
            ],
        },
    ),
    "api_run": (
        "API: runs, data, checkpoints",
        {
            "A run": [
                *(
                    "hfjax.trainer:TrainConfig",
                    "hfjax.trainer:train",
                    "hfjax.trainer:Result",
                    "hfjax.trainer:load",
                    "hfjax.trainer:Tracker",
                ),
                *("hfjax.trainer:RunComponents", "hfjax.trainer:evaluate", "hfjax:generate"),
            ],
            "Text": [
                *("hfjax.data:Loader", "hfjax.data:TokenSet", "hfjax.data:prepare"),
                *("hfjax.data:write_tokens", "hfjax.data:load_tokenizer", "hfjax.data:share"),
                "hfjax.data:from_grain",
                "hfjax.data:standard_library",
            ],
            "Images": [
                *(
                    "hfjax.data.images:ImageSet",
                    "hfjax.data.images:ImageLoader",
                    "hfjax.data.images:Augment",
                ),
                *("hfjax.data.images:parts_of", "hfjax.data.images:check_same_classes"),
            ],
            "Checkpoints": [
                *("hfjax:save", "hfjax:restore", "hfjax:latest_step", "hfjax:checkpoint_metadata"),
                *("hfjax:CheckpointManager", "hfjax:RetentionPolicy", "hfjax:RestoredRun"),
            ],
            "Processes": [
                "hfjax:simulate_devices",
                *("hfjax:init_distributed", "hfjax.distributed:Stop", "hfjax.distributed:Watchdog"),
                *("hfjax.distributed:leaving", "hfjax.distributed:exit_code"),
                *(
                    "hfjax.distributed:check_same",
                    "hfjax.distributed:say",
                    "hfjax.distributed:speaks",
                ),
            ],
        },
    ),
    "api_analysis": (
        "API: counting, planning, comparing",
        {
            "What a program does": [
                *(
                    "hfjax:collectives",
                    "hfjax:Collectives",
                    "hfjax.analysis:host_transfers",
                    "hfjax.analysis:Transfers",
                ),
                *(
                    "hfjax.analysis:saved_residuals",
                    "hfjax.analysis:least_offload",
                    "hfjax.analysis:target_devices",
                ),
            ],
            "Plans": ["hfjax:make_plan"],
            "Compared with one device": [
                "hfjax.testing:assert_strategies_agree",
                "hfjax.testing:strategies",
            ],
            "From haiscale and DeepSpeed": [
                *(
                    "hfjax.compat:GPipe",
                    "hfjax.compat:PipeDream",
                    "hfjax.compat:Interleaved1F1B",
                    "hfjax.compat:partition",
                ),
                *("hfjax.compat:Partition", "hfjax.compat:from_deepspeed"),
            ],
        },
    ),
}
PAGES = [*API, "flags", "presets", "combines", "exit_codes", "versions"]


def pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each page."""
    for name, (title, groups) in API.items():
        yield name, _api(title, groups)
    yield "flags", _flags()
    yield "presets", _presets()
    yield "combines", _combines()
    yield "exit_codes", _exit_codes()
    yield "versions", _versions()


def the(name: str) -> object:
    """Return what module:name is."""
    module, _, attribute = name.partition(":")
    return reduce(getattr, attribute.split("."), importlib.import_module(module))


def _api(title: str, groups: dict[str, list[str]]) -> str:
    parts = [f"# {title}"]
    for heading, names in groups.items():
        parts += [f"## {heading}", *map(_entry, names)]
    return "\n\n".join(parts) + "\n"


def _entry(name: str) -> str:
    """Return what autodoc is asked for one name, shown as users write it."""
    module, _, attribute = name.partition(":")
    thing, shown = the(name), f"{module}.{attribute}"
    if inspect.isclass(thing):
        lines = [f".. autoclass:: {shown}", "   :members:"]
    elif inspect.isfunction(thing):
        lines = [f".. autofunction:: {shown}"]
    else:  # a strategy: its table says it
        lines = [f".. py:data:: {shown}", "", "   .. code-block:: text", ""]
        lines += [f"      {line}".rstrip() for line in str(thing).splitlines()]
    return "\n".join(["```{eval-rst}", *lines, "```"])


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]], searchable: bool = True) -> str:
    cell = lambda text: text.replace("|", "\\|").replace("*", "\\*").replace("\n", " ")
    lines = [head, ("---",) * len(head), *rows]
    table = "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)
    return f"{{.searchable}}\n{table}" if searchable else table


def _flags() -> str:
    parts = [
        "# Commands and flags",
        "What `hfjax COMMAND --help` prints. A flag `--model.preset` is `preset` of `model` in a "
        "YAML file for `--config`, and in `hfjax.trainer.TrainConfig`.",
    ]
    for command, (what, _) in COMMANDS.items():
        shown = [flag for flag in help_of(command)[1] if flag.name not in ("-h", "-h,")]
        box = lambda flag: "" if flag.box == "options" else flag.box.removesuffix(" options")
        rows = [(f"`{flag.invocation}`", flag.text, box(flag)) for flag in shown]
        parts += [f"## hfjax {command}", f"{what[0].upper()}{what[1:]}."]
        parts += [_table(("flag", "what it says", "group"), rows)] if rows else []
    return "\n\n".join([*parts, ""])


def _presets() -> str:
    from hfjax.models.vision.preset_table import PRESETS as IMAGES
    from hfjax.trainer.model import presets

    text = []
    for name, (kind, size) in presets().items():
        shape = importlib.import_module(kind.__module__).PRESETS[size]
        numbers = [getattr(shape, each, "") for each in ("layers", "embed", "heads", "length")]
        row = (name, kind.__name__, *map(str, numbers), str(shape.vocab))
        text.append((*row, _count(lambda rngs, k=kind, s=shape: k(s, rngs=rngs))))
    images = []
    for name, shape in IMAGES.items():
        module, model = type(shape).__module__, type(shape).__name__.removesuffix("Config")
        kind = getattr(importlib.import_module(module), model)
        count = _count(lambda rngs, k=kind, s=shape: k(s, rngs=rngs))
        images.append((name, model, str(shape.classes), count))
    sizes = ("layers", "hidden size", "heads", "sequence length", "vocabulary")
    head = ("preset", "class", *sizes, "parameters")
    return "\n\n".join(
        [
            "# Presets",
            "`hfjax train --model.preset NAME` takes one of these, and the vocabulary of the data.",
            *("## Text", _table(head, text)),
            *("## Images", _table(("preset", "class", "classes", "parameters"), images)),
            "",
        ]
    )


def _count(init: Callable) -> str:
    """Return how many parameters a model has; none of them is made."""
    from flax import nnx

    model = nnx.eval_shape(lambda: init(nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    return f"{sum(leaf.size for leaf in leaves):,}"


def _combines() -> str:
    from hfjax.checks.feature_conflicts import cell, refusals
    from hfjax.checks.features import FEATURES

    said = {"+": "yes", "-": "no", "?": "not always", ".": "same setting, or one needs the other"}
    rows = []
    for one, other in itertools.combinations(FEATURES, 2):
        found = [
            f"{f'Only {each.condition_text}: ' if each.condition_text else ''}{each.why}. "
            f"{each.instead} {each.detected_later}".strip()
            for each in refusals(one, other)
        ]
        rows.append((one, other, said[cell(one, other)], " ".join(found)))
    return "\n\n".join(
        [
            "# What combines: a table to search",
            "Each pair of features: type `schedule no` to see what a pipeline refuses. The errors "
            "come from the same table; tests train every pair that works. "
            "[combinations](../combinations.md) has it as a matrix.",
            _table(("one", "other", "together", "why not, and what to do"), rows),
            "",
        ]
    )


def _exit_codes() -> str:
    from hfjax.distributed import exit_codes

    codes = {getattr(exit_codes, name): what for name, what in EXIT_CODES.items()}
    again = lambda code: "yes" if exit_codes.is_resumable(code) else "no"
    rows = [(str(code), what, again(code)) for code, what in codes.items()]
    return "\n\n".join(
        [
            "# Exit codes",
            "How a process of `hfjax` ended. After those with *yes* the same command goes on from "
            "the last checkpoint. [Several processes](../processes.md) has the rest.",
            _table(("code", "the process", "start it again"), rows, searchable=False),
            "",
        ]
    )


EXIT_CODES = {
    "FINISHED": "finished",
    "FAILED": "raised an exception; standard error says which",
    "MISTAKE": "was given an invalid setting; a restart does not help",
    "ASKED": "saved and stopped, because the program asked for it (a time limit)",
    "HUNG": "made no progress for `--watchdog-timeout` seconds; the watchdog ended it",
    "INTERRUPTED": "saved and stopped after Ctrl-C",
    "TERMINATED": "saved and stopped after SIGTERM",
}


def _versions() -> str:
    from hfjax.hardware.machine import MACHINES

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [("Python", project["requires-python"]), *map(_bound, project["dependencies"])]
    extras = [
        (f"`hfjax[{name}]`", ", ".join(f"`{each}`" for each in packages))
        for name, packages in project["optional-dependencies"].items()
    ]
    gpus = [
        (key, machine.name, f"{machine.memory / 2**30:.0f} GiB")
        for key, machine in MACHINES.items()
    ]
    return "\n\n".join(
        [
            "# Versions and hardware",
            "## Packages",
            _table(("needs", "version"), needed, searchable=False),
            "## Extras",
            _table(("`pip install`", "installs"), extras, searchable=False),
            "## GPUs that are known by name",
            "`--gpu NAME` of `hfjax memory` and `hfjax plan`. [Status](../status.md) says on which "
            "hardware hfjax ran.",
            _table(("name", "GPU", "memory"), gpus, searchable=False),
            "",
        ]
    )


def _bound(requirement: str) -> tuple[str, str]:
    name, least, version = requirement.partition(">=")
    return f"`{name}`", f"{least}{version}"
