"""Write the adapters of a state as peft's files: adapter_model.safetensors, adapter_config.json."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from hfjax.adapters.lora_model import Lora
from hfjax.adapters.low_rank import Adapter
from hfjax.adapters.peft_config import CONFIG_FILE, TENSOR_FILE
from hfjax.adapters.peft_rules import (
    adapter_mappings,
    group_suffixes,
    has_inputs_first,
    matrices_of,
    module_name,
    saved_mapping,
    shortest_suffixes,
)
from hfjax.sharding.check_state import check_layout
from hfjax.sharding.layout import Layout, State
from hfjax.utils.keywords import parse_dtype, strict_keywords
from hfjax.weights.pretrained import Pretrained
from hfjax.weights.save import TensorSpecs, full_precision_params, write_files, write_json
from hfjax.weights.tensor_files import KNOWN_TYPES, plan_file
from hfjax.weights.tensor_rules import TensorMapping

ATTENTION = re.compile(r"attn")  # in names of modules
EMBEDDING = "embed_tokens"  # the name of an embedding whose head peft can keep tied to it


@strict_keywords
def export_adapter(
    path: str | Path, layout: Layout, state: State, dtype: DTypeLike | None = None
) -> int:
    """Write the adapters of a state as files that peft loads; return the bytes this process wrote.

    Args:
        path: The new folder, which gets adapter_model.safetensors and adapter_config.json. It must
            not exist yet, and appears once it is complete.
        layout: The layout of the state, of a model of `hfjax.adapters.lora`. All processes call
            this.
        state: The state whose adapters are written, in any layout, stored for any schedule.
        dtype: The dtype of all tensors: float32, bfloat16, float16 or float64 (or fp32, bf16 …).
            None: each as it is stored.

    Raises:
        ValueError: The folder exists, or the layout's model has no adapters.

    Example:
        >>> hfjax.adapters.export_adapter("my-adapter", layout, state)  # doctest: +SKIP
    """
    check_layout(layout)
    content = AdapterContent(*_lora_model(layout))
    content.check_dense_layers()
    mappings = content.mappings
    specs = _tensor_specs(layout, mappings, dtype)
    tensors = {t.name: t for t in plan_file(Path(TENSOR_FILE), specs)}
    mappings = [
        replace(m, tensor=tensors[m.name], twin=tensors.get(m.rule.twin or "")) for m in mappings
    ]
    record = content.config
    return write_files(
        *(Path(path), layout, lambda: full_precision_params(layout, state), mappings),
        *({TENSOR_FILE: specs}, lambda new: write_json(new / CONFIG_FILE, record)),
    )


def _lora_model(layout: Layout) -> tuple[Lora, Pretrained]:
    """Return the model of a layout, and its base."""
    model = layout.template.model_init
    if not isinstance(model, Lora):
        raise ValueError(
            "export_adapter: the layout's model has no adapters (hfjax.adapters.lora gives it "
            "some). hfjax.export(path, layout, state, like=model) writes a whole model."
        )
    if not isinstance(model.base, Pretrained):
        raise ValueError(
            "export_adapter: peft's names are those of a model from Hugging Face, and the base is "
            "a function. Give hfjax.adapters.lora what hfjax.pretrained returns."
        )
    return model, model.base


def _tensor_specs(
    layout: Layout, mappings: Sequence[TensorMapping], dtype: DTypeLike | None
) -> TensorSpecs:
    """Return the dtype and shape of each tensor to write."""
    out_dtype = None if dtype is None else parse_dtype("dtype", dtype)
    if out_dtype is not None and out_dtype.name not in KNOWN_TYPES:
        raise ValueError(f"dtype={dtype!r}: one of {', '.join(KNOWN_TYPES)} is expected.")
    dtype_of = lambda path: np.dtype(layout.template.parameters[path].dtype)
    return {
        name: (out_dtype or dtype_of(m.path), m.rule.shape)
        for m in mappings
        for name in (m.name, m.rule.twin)
        if name is not None
    }


@dataclass(frozen=True)
class AdapterContent:
    """What the files of an adapter hold.

    Attributes:
        model: The model with adapters.
        base: Its base.
    """

    model: Lora
    base: Pretrained

    @cached_property
    def matrices(self) -> dict[str, list[TensorMapping]]:
        """The base's matrices with an adapter, by the name of their map."""
        return matrices_of([x.map for x in self.model.adapters], self.base.mappings)

    @cached_property
    def adapter_of(self) -> dict[str, Adapter]:
        """The adapter of each module, by its name in transformers."""
        adapters = self.model.adapters
        return {module_name(m): x for x in adapters for m in self.matrices[x.map.name]}

    def check_dense_layers(self) -> None:
        """Refuse adapters of dense MLPs beside experts.

        Peft takes their names, however they are written, for those of the experts, which
        transformers 5 fuses (`_convert_peft_config_moe`), and would leave them out.
        """
        has_experts = any("{expert}" in m.rule.theirs for m in self.base.mappings)
        dense = [name for name in self.adapter_of if not ATTENTION.search(name)]
        if has_experts and dense:
            raise ValueError(
                f"export_adapter: {dense[0]} has an adapter, a dense layer of a model with "
                "experts: peft takes its name for one of an expert, and would not read it. Write "
                'the whole model (hfjax.export, --merge), or train targets=["attention"].'
            )

    @cached_property
    def saved(self) -> list[TensorMapping]:
        """The mappings of modules that train whole, as in the base's files."""
        paths = {m.path for m in self.base.mappings if not self.model.is_frozen(m.path)}
        modules = {module_name(m) for m in self.base.mappings if m.path in paths}
        if both := sorted(modules & self.adapter_of.keys()):
            raise ValueError(
                f"export_adapter: {both[0]} has an adapter and trains whole (modules_to_save), "
                "which peft cannot hold. Train one of them, or write the whole model: hfjax.export."
            )
        saved = [m for m in self.base.mappings if module_name(m) in modules]
        for m in saved:
            if "/each/" in m.path or m.path.endswith("router_kernel"):
                raise ValueError(
                    f"export_adapter: {m.path} trains whole (modules_to_save), and peft has other "
                    "names for experts and routers. Write the whole model: hfjax.export."
                )
        return saved

    @property
    def mappings(self) -> list[TensorMapping]:
        """The mapping of each tensor of the file."""
        adapters = [
            mapping
            for adapter in self.model.adapters
            for mapping in adapter_mappings(adapter, self.matrices[adapter.map.name])
        ]
        return [*adapters, *map(saved_mapping, self.saved)]

    @property
    def config(self) -> dict[str, Any]:
        """The content of adapter_config.json."""
        options = self.model.options
        ranks = {name: x.rank for name, x in self.adapter_of.items()}
        alphas = {name: x.alpha for name, x in self.adapter_of.items()}
        rank, alpha = _most_common(ranks), _most_common(alphas)
        saved = self._saved_names()
        modules = {module_name(m) for m in self.base.mappings}
        name, _, revision = (self.base.folder.hub or str(self.base.folder.path)).partition("@")
        first = self.model.adapters[0]
        is_transposed = has_inputs_first(self.matrices[first.map.name][0].rule, first.map.inputs)
        return {
            **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": name},
            **({"revision": revision} if self.base.folder.hub else {"revision": None}),
            **{"inference_mode": True, "r": int(rank), "lora_alpha": _plain(alpha)},
            "target_modules": shortest_suffixes(self.adapter_of, modules),
            "rank_pattern": {k: int(x) for k, x in group_suffixes(ranks, rank).items()},
            "alpha_pattern": {k: _plain(x) for k, x in group_suffixes(alphas, alpha).items()},
            **{"use_rslora": options.use_rslora, "lora_dropout": options.dropout},
            **{"fan_in_fan_out": is_transposed, "bias": "none"},
            "init_lora_weights": "gaussian" if options.init == "gaussian" else True,
            "modules_to_save": saved or None,
            **({"ensure_weight_tying": True} if self._ties(saved) else {}),
        }

    def _saved_names(self) -> list[str]:
        """Return the names of modules that train whole, each the end of these modules' alone."""
        modules = {module_name(m) for m in self.base.mappings}
        names: dict[str, None] = {}
        for mapping in self.saved:
            for tensor in (mapping.name, mapping.rule.twin):
                if tensor is not None:
                    module = tensor.rpartition(".")[0]
                    short = module.rpartition(".")[2]
                    ends = [x for x in modules if x.endswith(short) and x != module]
                    names[module if ends else short] = None
        return list(names)

    def _ties(self, saved: Sequence[str]) -> bool:
        """Return whether a head is saved with its embedding, which peft shall keep equal."""
        return EMBEDDING in saved and any(m.rule.twin is not None for m in self.saved)


def _most_common(values: Mapping[str, float]) -> float:
    return Counter(values.values()).most_common(1)[0][0]


def _plain(x: float) -> int | float:
    """Return a whole number as an integer."""
    return int(x) if x == int(x) else x
