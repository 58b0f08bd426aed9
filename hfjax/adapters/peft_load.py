"""Read an adapter of peft: its configuration chooses the maps, its tensors stream in."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hfjax.adapters.adapter_weights import AdapterFiles
from hfjax.adapters.lora_model import Lora
from hfjax.adapters.lora_options import LoraOptions
from hfjax.adapters.low_rank import LinearMap
from hfjax.adapters.peft_config import (
    CONFIG_FILE,
    MERGE,
    TENSOR_FILE,
    AdapterConfig,
    parse_config,
)
from hfjax.adapters.peft_rules import (
    PREFIX,
    adapter_mappings,
    matrices_of,
    module_name,
    saved_mapping,
)
from hfjax.distributed.consensus import run_on_all, speaks
from hfjax.parallel.jaxprs.model_mesh import without_mesh
from hfjax.utils.hub import HubName, download, exactly
from hfjax.utils.read_files import brief, read_text
from hfjax.utils.tables import first_lines, quote
from hfjax.weights.hub import find_model
from hfjax.weights.model_folder import has_file, read_json_object
from hfjax.weights.pretrained import Pretrained
from hfjax.weights.tensor_files import FileTensor, read_header
from hfjax.weights.tensor_rules import TensorMapping, find_mismatches

logger = logging.getLogger(__name__)


@without_mesh
def load_adapter(path: str | Path, model: Pretrained) -> Lora:
    """Return a model with the adapters of peft's files, and their weights to stream into it.

    Args:
        path: A folder with adapter_config.json and adapter_model.safetensors, as peft's
            save_pretrained writes it; or its name on the Hub, "org/name" or "org/name@revision". In
            a multi-process run, all processes call this.
        model: The model that it was trained on, as `hfjax.pretrained` returns it.

    Raises:
        ValueError: It is no LoRA of linear maps, or its tensors are not those of the model.

    Example:
        >>> model = hfjax.pretrained("Qwen/Qwen3-0.6B")  # doctest: +SKIP
        >>> adapted = hfjax.adapters.load_adapter("my-adapter", model)  # doctest: +SKIP
        >>> layout = hfjax.layout(adapted, optimizer, mesh, hfjax.FSDP)  # doctest: +SKIP
        >>> state = hfjax.init(layout, parameters=adapted.weights)  # doctest: +SKIP
    """
    if not isinstance(model, Pretrained):
        raise ValueError(
            f"load_adapter(…, model={type(model).__name__}): what hfjax.pretrained returns is "
            "expected, of the model that the adapter was trained on."
        )
    name = find_model(path)
    return run_on_all(lambda: _read_adapter(Path(path) if name is None else name, model))


def _read_adapter(source: Path | HubName, model: Pretrained) -> Lora:
    label = quote(source)
    folder = source if isinstance(source, Path) else download(source, exactly(FILES))
    for file in FILES:
        if not has_file(folder / file):
            raise ValueError(
                f"{label} has no {file}: the folder of an adapter is expected, with {FILES[0]} and "
                f"{FILES[1]}, as peft's save_pretrained writes it (a pickle, adapter_model.bin, is "
                "never opened)."
            )
    try:
        config = parse_config(read_json_object(folder / CONFIG_FILE))
        tensors = read_header(folder / TENSOR_FILE)
        options, mappings = match_adapter(config, tensors, model)
        adapted = Lora(model, options)
        len(adapted.adapters)  # called for its checks
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from None
    _warn_about_base(label, config, model)
    return replace(
        adapted, files=AdapterFiles(label, _fingerprint(folder, tensors), tuple(mappings))
    )


FILES = (CONFIG_FILE, TENSOR_FILE)


def match_adapter(
    config: AdapterConfig, tensors: Mapping[str, FileTensor], model: Pretrained
) -> tuple[LoraOptions, list[TensorMapping]]:
    """Return the options of an adapter's model, and the mappings of its tensors.

    Args:
        config: The adapter's configuration.
        tensors: The tensors of its file, by name.
        model: The model that it was trained on.
    """
    _check_kinds(tensors)
    maps = Lora(model).maps
    matrices = matrices_of(maps, model.mappings)
    chosen = [m for m in maps if _is_target(config, m, matrices[m.name])]
    if not chosen:
        names = sorted({module_name(x) for mappings in matrices.values() for x in mappings})
        raise ValueError(
            f"{CONFIG_FILE}: target_modules ({brief(config.targets)}) are no linear maps of "
            f"{model.folder.source}, which has {', '.join(first_lines(names, 4))}: the adapter is "
            "of another model."
        )
    saved = _saved_mappings(config, tensors, model)
    options = _options(config, chosen, matrices, saved)
    adapted = Lora(model, options)
    expected = [
        x
        for adapter in adapted.adapters
        for x in adapter_mappings(adapter, matrices[adapter.map.name])
    ]
    mappings = [
        replace(m, tensor=tensors.get(m.name), twin=tensors.get(m.rule.twin or ""))
        for m in (*expected, *saved)
    ]
    _check_tensors(mappings, tensors, model)
    return options, mappings


def _check_kinds(tensors: Mapping[str, FileTensor]) -> None:
    """Refuse adapters of embeddings, heads and experts, and other tensors of peft's tuners."""
    for name in tensors:
        if "lora_embedding_" in name or name.startswith(f"{PREFIX}lm_head.lora_"):
            raise ValueError(
                f"{quote(name)} is the adapter of an embedding or head, which is not read. Train "
                'it whole, modules_to_save=["embed_tokens", "lm_head"] of LoraConfig, or merge it '
                "into its model with peft (merge_and_unload), and give that one."
            )
        if ".experts." in name:
            raise ValueError(
                f"{quote(name)} is the adapter of an expert: experts have none here. {MERGE}"
            )
        if "lora_magnitude_vector" in name or (name.endswith(".bias") and ".lora_" in name):
            raise ValueError(
                f"{quote(name)} is no tensor of a plain LoRA (DoRA, or a bias). {MERGE}"
            )


def _is_target(
    config: AdapterConfig, linear_map: LinearMap, matrices: Sequence[TensorMapping]
) -> bool:
    """Return whether a map has an adapter; all layers of a stack must have one, or none."""
    return bool(_same_in_layers("an adapter", config.is_target, linear_map, matrices))


def _same_in_layers(
    what: str,
    of: Callable[[str], Any],
    linear_map: LinearMap,
    matrices: Sequence[TensorMapping],
) -> Any:
    """Return a property of the modules of a map, which must be the same in all of them."""
    values = {module_name(x): of(module_name(x)) for x in matrices}
    if len({*values.values()}) > 1:
        lines = [f"{name}: {x}" for name, x in values.items()]
        raise ValueError(
            f"{CONFIG_FILE} gives some layers of {linear_map.name} {what} that others have not "
            f"({', '.join(first_lines(lines, 4))}), and layers are stored in one array here. "
            f"{MERGE}"
        )
    return next(iter(values.values()))


def _options(
    config: AdapterConfig,
    chosen: Sequence[LinearMap],
    matrices: Mapping[str, Sequence[TensorMapping]],
    saved: Sequence[TensorMapping],
) -> LoraOptions:
    """Return the options of a model with these adapters, each map by its name."""
    same = lambda what, of, m: _same_in_layers(what, of, m, matrices[m.name])
    ranks = {m.name: same("a rank", config.rank_of, m) for m in chosen}
    alphas = {m.name: same("an alpha", config.alpha_of, m) for m in chosen}
    return LoraOptions(
        *(config.rank, config.alpha, tuple(ranks), config.dropout, config.use_rslora),
        rank_pattern={name: x for name, x in ranks.items() if x != config.rank},
        alpha_pattern={name: x for name, x in alphas.items() if x != config.alpha},
        modules_to_save=tuple(dict.fromkeys(m.path for m in saved)),
        init="gaussian" if config.gaussian else "uniform",
    )


def _saved_mappings(
    config: AdapterConfig, tensors: Mapping[str, FileTensor], model: Pretrained
) -> list[TensorMapping]:
    """Return the mappings of tensors that are in the file whole."""
    names = lambda m: [x for x in (m.name, m.rule.twin) if x is not None]
    is_saved = lambda m: any(
        PREFIX + x in tensors or config.is_saved(x.rpartition(".")[0]) for x in names(m)
    )
    paths = {m.path for m in model.mappings if is_saved(m)}
    saved = [m for m in model.mappings if m.path in paths]
    for m in saved:
        in_file = [PREFIX + x in tensors for x in names(m)]
        if any(in_file) and not all(in_file):
            ours, other = names(m) if in_file[0] else reversed(names(m))
            raise ValueError(
                f"the file has {quote(PREFIX + ours)} and not {quote(PREFIX + other)}: it trained "
                f"one of two matrices which are the same in {model.folder.source} "
                "(tie_word_embeddings). Train both, ensure_weight_tying=True of LoraConfig."
            )
    return [saved_mapping(m) for m in saved]


def _check_tensors(
    mappings: Sequence[TensorMapping], tensors: Mapping[str, FileTensor], model: Pretrained
) -> None:
    """Refuse tensors that are missing, of another shape, or of no module of the model."""
    used = {t.name for m in mappings for t in (m.tensor, m.twin) if t is not None}
    unused = [t for name, t in tensors.items() if name not in used]
    if lines := find_mismatches(mappings, unused):
        raise ValueError(
            f"the tensors of {TENSOR_FILE} are not those that {CONFIG_FILE} describes for "
            f"{model.folder.source}:\n  " + "\n  ".join(lines) + "\nNo weight was read. Give the "
            "model that the adapter was trained on."
        )


def _warn_about_base(label: str, config: AdapterConfig, model: Pretrained) -> None:
    """Log a warning if the adapter was trained on a model of another name."""
    name = str(model.folder.hub or model.folder.path).partition("@")[0]
    if config.base and Path(config.base).name != Path(name).name and speaks():
        logger.warning(
            "%s was trained on %s, and is given %s: its names and shapes fit, its weights do only "
            "if both are one model",
            *(label, quote(config.base), model.folder.source),
        )


def _fingerprint(folder: Path, tensors: Mapping[str, FileTensor]) -> str:
    """Return a hash of the configuration and of the header of the tensors."""
    digest = hashlib.sha256(read_text(folder / CONFIG_FILE).encode())
    for name, t in sorted(tensors.items()):
        digest.update(f"{name} {t.dtype} {t.shape} {t.begin}\n".encode())
    return digest.hexdigest()[:16]
