"""adapter_config.json: what peft writes beside an adapter's tensors, read and written.

Which modules have an adapter, and of what rank, follows from patterns as peft applies them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hfjax.adapters.lora_options import ALL_LINEAR
from hfjax.utils.keywords import is_int
from hfjax.utils.read_files import ANYTHING, brief, check_fields, integer, is_number, object_of
from hfjax.utils.tables import quote

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
MERGE = "Merge it into its model with peft (merge_and_unload), and give that one."
CHANGES_BASE = re.compile(r"(pissa|olora|corda|loftq|lora_ga|mica)", re.IGNORECASE)
REFUSED = {  # key: what it is
    "use_dora": "DoRA scales the columns of the merged matrices",
    "target_parameters": "adapters of parameters that are no linear maps (experts)",
    "lora_bias": "biases of the adapters",
    "layer_replication": "layers that stand in the model several times",
    "trainable_token_indices": "embeddings of some tokens that train alone",
    "alora_invocation_tokens": "adapters that begin at some tokens (aLoRA)",
    "use_qalora": "adapters of quantized matrices (QALoRA)",
    "use_bdlora": "adapters of block-diagonal matrices (BD-LoRA)",
    "arrow_config": "a router of several adapters (Arrow)",
    "kasa_config": "adapters with singular values (KaSA)",
    "monteclora_config": "adapters that are drawn at random (MonteCLoRA)",
    "velora_config": "a backward pass of its own (VeLoRA)",
    "megatron_config": "Megatron's linear maps",
}
WITHOUT_EFFECT = {  # keys that change nothing of what the tensors compute
    *("auto_mapping", "peft_version", "revision", "inference_mode", "task_type", "eva_config"),
    *("loftq_config", "corda_config", "lora_ga_config", "megatron_core", "qalora_group_size"),
    *("runtime_config", "fan_in_fan_out", "ensure_weight_tying", "base_model_name_or_path"),
    *("bias", "peft_type"),
}
NAMES = (
    "a list of names, or a text",
    lambda x: isinstance(x, str) or (isinstance(x, list) and all(isinstance(y, str) for y in x)),
)
MAYBE_NAMES = (f"{NAMES[0]}, or null", lambda x: x is None or NAMES[1](x))
LAYERS = (
    "null, a number or a list of numbers",
    lambda x: x is None or is_int(x, 0) or (isinstance(x, list) and all(is_int(i, 0) for i in x)),
)
CHECKS: Mapping[str, Any] = {
    "r": integer(1),
    "lora_alpha": ("a number other than 0", lambda x: is_number(x) and x != 0),
    "target_modules": NAMES,
    "exclude_modules": MAYBE_NAMES,
    "modules_to_save": MAYBE_NAMES,
    "lora_dropout": ("a number from 0 to below 1", lambda x: is_number(x) and 0 <= x < 1),
    "use_rslora": ("true or false", lambda x: isinstance(x, bool)),
    "rank_pattern": object_of("ranks", lambda x: is_int(x, 1)),
    "alpha_pattern": object_of("numbers other than 0", lambda x: is_number(x) and x != 0),
    "layers_to_transform": LAYERS,
    "layers_pattern": MAYBE_NAMES,
    "init_lora_weights": ANYTHING,
}
DEFAULTS: Mapping[str, Any] = {
    **{"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False},
    **{"init_lora_weights": True, "rank_pattern": {}, "alpha_pattern": {}},
    **dict.fromkeys(("exclude_modules", "modules_to_save", "layers_to_transform")),
    "layers_pattern": None,
}


@dataclass(frozen=True)
class AdapterConfig:
    """The content of an adapter_config.json, which was checked.

    Attributes:
        rank: The rank of modules that no pattern names.
        alpha: Their alpha.
        targets: Names' ends of modules with an adapter, or one regular expression.
        excluded: The same, of modules without.
        saved: Names' ends of modules that train whole.
        dropout: The fraction of the adapters' inputs that is dropped.
        use_rslora: Whether the scale is alpha / sqrt(rank).
        rank_pattern: Ranks of other modules, by regular expression.
        alpha_pattern: Their alphas.
        layers: The numbers of the layers with adapters; None: all.
        layers_pattern: The names before such a number.
        gaussian: Whether A is drawn from a normal distribution.
        base: The name of the model that it was trained on.
    """

    rank: int
    alpha: float
    targets: str | Sequence[str]
    excluded: str | Sequence[str] = ()
    saved: Sequence[str] = ()
    dropout: float = 0.0
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    layers: Sequence[int] | None = None
    layers_pattern: Sequence[str] = ()
    gaussian: bool = False
    base: str | None = None

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's adapter."""
        return _first_match(self.rank_pattern, module, self.rank)

    def alpha_of(self, module: str) -> float:
        """Return the alpha of a module's adapter."""
        return _first_match(self.alpha_pattern, module, self.alpha)

    def is_target(self, module: str) -> bool:
        """Return whether a linear map has an adapter.

        Args:
            module: Its name in transformers.
        """
        if _matches(self.excluded, module) or self._is_in_saved(module):
            return False
        if isinstance(self.targets, str) and self.targets.lower() == ALL_LINEAR:
            return True
        return _matches(self.targets, module) and self._is_in_layers(module)

    def is_saved(self, module: str) -> bool:
        """Return whether a module trains whole."""
        return any(module.endswith(name) for name in self.saved)

    def _is_in_saved(self, module: str) -> bool:
        return any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in self.saved)

    def _is_in_layers(self, module: str) -> bool:
        if isinstance(self.targets, str) or not self.layers:
            return True
        forms = [rf"(?:^|.*?\.){name}\.(\d+)\." for name in self.layers_pattern]
        matches = (re.match(form, module) for form in forms or [r".*?\.[^.]*\.(\d+)\."])
        number = next((match[1] for match in matches if match), None)
        return number is not None and int(number) in self.layers


def _matches(names: str | Sequence[str], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _first_match(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    values = (x for key, x in pattern.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(values, default)


def parse_config(record: Mapping[str, Any]) -> AdapterConfig:
    """Return the content of an adapter_config.json; ValueError names a key that is not read.

    Args:
        record: The content of the file.

    Example:
        >>> from hfjax.adapters.peft_config import parse_config
        >>> config = parse_config({"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]})
        >>> config.is_target("model.layers.0.self_attn.q_proj")
        True
    """
    _check_kind(record)
    try:
        values = check_fields({**DEFAULTS, **_without_null(record)}, CHECKS)
        config = _from_values(values)
        _check_expressions(config)
    except ValueError as error:
        raise ValueError(f"{CONFIG_FILE}: {error}.".replace("..", ".")) from None
    return config


def _from_values(values: Mapping[str, Any]) -> AdapterConfig:
    def as_list(x: Any) -> list[Any]:
        return [x] if isinstance(x, str | int) else list(x or ())

    excluded, layers = values["exclude_modules"], values["layers_to_transform"]
    return AdapterConfig(
        *(values["r"], float(values["lora_alpha"]), values["target_modules"]),
        excluded=excluded or (),
        saved=as_list(values["modules_to_save"]),
        dropout=float(values["lora_dropout"]),
        use_rslora=values["use_rslora"],
        rank_pattern=values["rank_pattern"],
        alpha_pattern={key: float(x) for key, x in values["alpha_pattern"].items()},
        layers=None if layers is None else as_list(layers),
        layers_pattern=as_list(values["layers_pattern"]),
        gaussian=str(values["init_lora_weights"]).lower() == "gaussian",
        base=values.get("base_model_name_or_path"),
    )


def _without_null(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: x for key, x in record.items() if x is not None}


def _check_kind(record: Mapping[str, Any]) -> None:
    """Refuse what is no LoRA, or more than one."""
    kind, bias, init = (record.get(key) for key in ("peft_type", "bias", "init_lora_weights"))
    if kind != "LORA":
        raise ValueError(f"{CONFIG_FILE}: peft_type is {brief(kind)}: LORA is read alone. {MERGE}")
    for key, value in record.items():
        if key in REFUSED and value:
            raise ValueError(
                f"{CONFIG_FILE}: {key} is {brief(value)}: {REFUSED[key]}, which is not read. "
                f"{MERGE}"
            )
        if key not in {*REFUSED, *CHECKS, *WITHOUT_EFFECT} and value:
            raise ValueError(
                f"{CONFIG_FILE}: {quote(key)} is {brief(value)}, a key that is not known here: it "
                f"may change what the adapter computes. {MERGE}"
            )
    if bias not in (None, "none"):
        raise ValueError(
            f"{CONFIG_FILE}: bias is {brief(bias)}: biases that train with the adapter are not "
            f'read, "none" is expected. {MERGE}'
        )
    if isinstance(init, str) and CHANGES_BASE.match(init):
        raise ValueError(
            f"{CONFIG_FILE}: init_lora_weights is {brief(init)}, which changes the base's weights, "
            "too, and the file does not hold these. Let peft convert it to a plain adapter: "
            "save_pretrained(folder, path_initial_model_for_weight_conversion=FIRST_ADAPTER)."
        )


def _check_expressions(config: AdapterConfig) -> None:
    """Refuse what is no regular expression."""
    expressions = [x for x in (config.targets, config.excluded) if isinstance(x, str)]
    keys = [f"({key})" for key in (*config.rank_pattern, *config.alpha_pattern)]
    for text in (*expressions, *keys, *config.saved, *config.layers_pattern):
        try:
            re.compile(text)
        except re.error as error:
            raise ValueError(f"{quote(text)} is no regular expression ({error})") from None
