"""`hfjax.pretrained`: a model folder becomes a model for a layout, and weights to stream into it.

`hfjax.export` is the inverse.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from hfjax.data.tokenizer import load_tokenizer
from hfjax.distributed.consensus import check_same, run_on_all
from hfjax.models.gpt import GPTConfig
from hfjax.models.llama import LlamaConfig, LocalLayers
from hfjax.models.moe.layer import MixtureOptions
from hfjax.models.moe.moe_llama import MoEConfig
from hfjax.parallel.jaxprs.model_mesh import without_mesh
from hfjax.sharding.check_state import check_layout
from hfjax.sharding.layout import Layout, State
from hfjax.utils.keywords import check_keywords, is_int, parse_dtype, strict_keywords
from hfjax.utils.paths import Flat
from hfjax.utils.tables import first_lines, human, parse_bytes, quote
from hfjax.weights.families import FAMILIES, Family, parse_config
from hfjax.weights.hub import open_folder
from hfjax.weights.load import WeightStream
from hfjax.weights.model_folder import TOKENIZER, ModelFolder, has_file
from hfjax.weights.save import write_folder
from hfjax.weights.tensor_files import KNOWN_TYPES
from hfjax.weights.tensor_rules import RuleTable, Shape, TensorMapping, check_coverage, format_table

PARAM_DTYPES = ("float32", "bfloat16")
COUNT_KEYS = ("num_hidden_layers", "n_layer", "num_experts", "num_local_experts")
SHARD = "5GB"


@dataclass(frozen=True, eq=False)
class Pretrained:
    """A model as its folder describes it; no weights were read. Prints as the table of its tensors.

    Attributes:
        folder: The content of the folder.
        family: Its entry in the table of families.
        config: The configuration of hfjax's model.
        param_dtype: The dtype in which parameters are stored.

    Example:
        >>> import hfjax
        >>> model = hfjax.pretrained("llama-3.2-1b")  # doctest: +SKIP
        >>> layout = hfjax.layout(model.create, optimizer, mesh, hfjax.FSDP)  # doctest: +SKIP
        >>> state = hfjax.init(layout, parameters=model.weights)  # doctest: +SKIP
    """

    folder: ModelFolder
    family: Family
    config: Any
    param_dtype: str = "float32"

    def create(self, rngs: nnx.Rngs) -> nnx.Module:
        """Return the model with random weights, as `hfjax.layout` takes it.

        Args:
            rngs: The random number generators.
        """
        model = self.family.model(self.config, rngs=rngs)
        if self.param_dtype != "float32":
            cast = lambda x: x.astype(self.param_dtype)
            nnx.update(model, jax.tree.map(cast, nnx.state(model, nnx.Param)))
        return model

    @cached_property
    def table(self) -> RuleTable:
        """The tensor rules."""
        return self.family.table(self.config)

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """The shape of each parameter, by path."""
        model = nnx.eval_shape(lambda: self.create(nnx.Rngs(0)))
        params = nnx.to_flat_state(nnx.state(model, nnx.Param))
        return {"/".join(map(str, path)): x.get_value().shape for path, x in params}

    @cached_property
    def mappings(self) -> list[TensorMapping]:
        """The mapping of every tensor; ValueError lists mismatches."""
        try:
            return self.table.match_tensors(self.folder.tensors, self.shapes)
        except ValueError as error:
            raise ValueError(f"{self.folder.source}: {error}") from None

    @cached_property
    def weights(self) -> "FolderWeights":
        """The weights to pass as `hfjax.init(layout, parameters=…)`."""
        return FolderWeights(self)

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder has a readable tokenizer."""
        return has_file(self.folder.path / TOKENIZER)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the folder; its `end` is the model's end-of-text token."""
        tokenizer: Any = load_tokenizer(self.folder.path)
        if tokenizer.vocab > self.config.vocab:
            raise ValueError(
                f"{quote(self.folder.path / TOKENIZER)} has {tokenizer.vocab} tokens, the model's "
                f"embedding {self.config.vocab} rows (vocab_size of config.json): the two are not "
                "of one model."
            )
        return tokenizer

    @property
    def bytes(self) -> int:
        """The total bytes of all tensors to read."""
        return sum(t.nbytes for p in self.mappings for t in (p.tensor, p.twin) if t is not None)

    def __str__(self) -> str:
        kinds = sorted({str(p.tensor.dtype) for p in self.mappings if p.tensor is not None})
        files = len(self.folder.files)
        head = (
            f"{self.folder.source}: {self.folder.config['model_type']}, "
            f"{len(self.mappings)} tensors of {', '.join(kinds)}, {human(self.bytes)} in "
            f"{files} file{'s' * (files > 1)}; stored as {self.param_dtype}"
        )
        used = {t.name for p in self.mappings for t in (p.tensor, p.twin) if t is not None}
        left = [name for name in self.folder.tensors if name not in used]
        over = f"not read, since they follow from config.json: {', '.join(map(quote, left[:4]))}"
        more = f" and {len(left) - 4} more" * (len(left) > 4)
        lines = [head, *(f"  {line}" for line in format_table(self.table))]
        return "\n".join([*lines, *[f"  {over}{more}"] * bool(left)])


@dataclass(eq=False)
class FolderWeights:
    """The weights of a folder, for `hfjax.init(layout, parameters=…)`.

    Attributes:
        model: The model of these weights.
        read: The bytes that this process has read, once they are in a layout.
    """

    model: Pretrained
    read: int = 0

    def into(self, layout: Layout) -> Flat:
        """Return the parameters for a layout that stores layers in the model's order."""
        check_same("folder of the model", {"hash": self.model.folder.fingerprint})
        mappings = run_on_all(lambda: self._mappings_for(layout))
        stream = WeightStream(layout, mappings)
        params = stream.parameters()
        self.read = stream.read
        return params

    def _mappings_for(self, layout: Layout) -> list[TensorMapping]:
        shapes = {path: x.shape for path, x in layout.arrays.items()}
        check_coverage(self.model.mappings, shapes)
        return self.model.mappings


@without_mesh
def pretrained(path: str | Path, stored: str = "float32", **changes: Any) -> Pretrained:
    """Return the model of a Hugging Face folder; only its configuration is read, no weights.

    Args:
        path: A folder with config.json and safetensors files, as transformers' save_pretrained
            writes it; or the name of a model on the Hub, "org/name" or "org/name@revision", which
            is downloaded into the Hub's cache (a folder of that name here wins, and a line says
            so). In a multi-process run, all processes call this; they must see the folder, and of
            the Hub they read the commit that process 0 finds.
        stored: The dtype in which parameters are stored and trained: float32, as hfjax stores its
            own models, or bfloat16 (with `hfjax.optimizers.master_weights`,
            which keeps a float32 copy: without it
            small updates are lost).
        changes: Overrides of fields of `config`, for instance `length=8192`.

    Raises:
        ValueError: The folder's model is unknown, or its content is damaged; or the Hub does not
            give it (no such name, no access, no network: the message says what to do).

    Example:
        >>> import hfjax
        >>> print(hfjax.pretrained("path/to/llama-3.2-1b"))  # doctest: +SKIP
        >>> print(hfjax.pretrained("Qwen/Qwen3-0.6B@main"))  # doctest: +SKIP
    """
    _param_dtype(stored)
    if "revision" in changes:
        raise ValueError(
            f"revision={changes['revision']!r}: write it behind the name, as flags and "
            f'configurations do: hfjax.pretrained("{path}@{changes["revision"]}").'
        )
    return from_folder(open_folder(path), stored, **changes)


def from_folder(folder: ModelFolder, param_dtype: str = "float32", **changes: Any) -> Pretrained:
    """Return the model that an already read folder describes: `pretrained` without the reading."""
    try:
        check_counts(folder)
        config = parse_config(folder.config)
        check_keywords("pretrained", changes, [field.name for field in fields(config)])
        config = replace(config, **changes)
    except ValueError as error:
        raise ValueError(f"{folder.source}: {error}") from None
    family = FAMILIES[folder.config["model_type"]]
    model = Pretrained(folder, family, config, _param_dtype(param_dtype))
    run_on_all(lambda: len(model.mappings))
    return model


def check_counts(folder: ModelFolder) -> None:
    """Refuse more layers or experts than the files have tensors, before rules are expanded."""
    text = folder.config.get("text_config")
    for section in (folder.config, text if isinstance(text, Mapping) else {}):
        for key in COUNT_KEYS:
            if is_int(section.get(key), len(folder.tensors) + 1):
                raise ValueError(
                    f"config.json: {key} is {section[key]}, and the files have "
                    f"{len(folder.tensors)} tensors in all: they are not of one model. Get the "
                    "config.json of the files again."
                )


def _param_dtype(dtype: Any) -> str:
    """Return the name of the dtype in which parameters are stored."""
    name = parse_dtype("stored", dtype).name
    if name not in PARAM_DTYPES:
        raise ValueError(
            f"stored={dtype!r}: one of {', '.join(PARAM_DTYPES)} (fp32, bf16) is expected."
        )
    return name


@strict_keywords
def export(
    path: str | Path,
    layout: Layout,
    state: State,
    like: Pretrained | str | Path | None = None,
    dtype: DTypeLike | None = None,
    shard: str | int = SHARD,
) -> int:
    """Write a state as a folder that transformers loads; return the bytes this process wrote.

    Adapters are merged into the model (`hfjax.adapters.export_adapter` writes them alone).

    Args:
        path: The new folder. It must not exist yet, and appears once it is complete.
        layout: The layout of the state. All processes call this.
        state: The state whose parameters are written, in any layout, stored for any schedule.
        like: The model that training began from, its folder, or its name on the Hub: names, dtypes,
            order, configuration and tokenizer are taken from it.
        dtype: The dtype of all tensors: float32, bfloat16, float16 or float64 (or fp32, bf16 …).
            None: each as in `like`.
        shard: The maximum size of a file.

    Raises:
        ValueError: The folder exists, the disk is full, or the state is not of the model `like`.

    Example:
        >>> hfjax.export("my-llama", layout, state, like=model)  # doctest: +SKIP
    """
    check_layout(layout)
    if like is None:
        raise ValueError(
            "hfjax.export(…, like=None): the names, types and configuration of the files are those "
            "of a model from Hugging Face. Give the one that this one began as: like=FOLDER."
        )
    model = like if isinstance(like, Pretrained) else pretrained(like)
    _check_like(model, layout)
    out_dtype = None if dtype is None else parse_dtype("dtype", dtype)
    if out_dtype is not None and out_dtype.name not in KNOWN_TYPES:
        raise ValueError(f"dtype={dtype!r}: one of {', '.join(KNOWN_TYPES)} is expected.")
    max_bytes = parse_bytes(str(shard), "shard")
    if max_bytes < 1:
        raise ValueError(f"shard={shard!r}: a size of at least one byte is expected.")
    return write_folder(
        Path(path), layout, state, model.folder, model.mappings, out_dtype, max_bytes
    )


def _check_like(model: Pretrained, layout: Layout) -> None:
    """Refuse a layout of another model; the error has both shapes, or the differing fields."""
    is_adapter = layout.template.is_adapter
    shapes = {path: tuple(x.shape) for path, x in layout.arrays.items() if not is_adapter(path)}
    lines = [
        f"{path} is {_format_shape(shapes.get(path))} in the state, "
        f"{_format_shape(model.shapes.get(path))} in "
        "the model"
        for path in sorted({*shapes, *model.shapes})
        if shapes.get(path) != model.shapes.get(path)
    ]
    model_config = getattr(layout.template.abstract("eval"), "config", None)
    if not lines and isinstance(model_config, GPTConfig | LlamaConfig):
        lines = differences(model_config, parse_config(model.folder.config))
    if lines:
        raise ValueError(
            f"the state is not of the model {model.folder.source}:\n  "
            + "\n  ".join(first_lines(lines))
            + "\nIts config.json would describe another model. Give the folder of the model that "
            "it began as, and change nothing of that: like=FOLDER."
        )


def differences(model_config: Any, file_config: Any) -> list[str]:
    """Return the differences of two configurations that change the computed function."""
    ours, theirs = (_computation_fields(config) for config in (model_config, file_config))
    return [
        f"{name} is {ours.get(name)} in the state, {theirs.get(name)} in the model"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    ]


TRAINING_FIELDS = {"vocab", "pad_vocab_to", "length", "dropout", "router", "dense"}
ROUTER_FIELDS = ("scores", "normalise", "scale", "groups", "best_groups")
ATTENTION_FIELDS = ("window", "cap")


def _computation_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration that determine the function of its weights."""
    values = {
        f.name: getattr(config, f.name) for f in fields(config) if f.name not in MIXING_FIELDS
    }
    values = {name: x for name, x in values.items() if name not in TRAINING_FIELDS}
    values["attention"] = [getattr(config.attention, name, None) for name in ATTENTION_FIELDS]
    if isinstance(local := values.get("local"), LocalLayers):
        attention = [getattr(local.attention, name, None) for name in ATTENTION_FIELDS]
        values["local"] = [local.layers, attention, local.rotary]
    if isinstance(config, MoEConfig):
        values |= {name: getattr(config, name) for name in ("top_k", "shared", "residual")}
        values |= {f"router.{name}": getattr(config.router, name) for name in ROUTER_FIELDS}
    return values


MIXING_FIELDS = {f.name for f in fields(MixtureOptions)}


def _format_shape(shape: Mapping | Shape | None) -> str:
    return "missing" if shape is None else f"[{', '.join(map(str, shape))}]"
