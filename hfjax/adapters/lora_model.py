"""`hfjax.adapters.lora`: a model whose linear maps have adapters, which train in its place."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import jax
from flax import nnx

from hfjax.adapters.adapter_weights import AdapterFiles, AdapterWeights
from hfjax.adapters.any_model import AnyModel, add_adapters, find_matrices, merge_matrices
from hfjax.adapters.base_weights import BaseWeights
from hfjax.adapters.lora_options import ALL_LINEAR, LoraOptions
from hfjax.adapters.low_rank import Adapter, LinearMap, LowRank, LowRankParts
from hfjax.adapters.merge_kernels import MergedParams
from hfjax.models.layers import Linear, stack_layers
from hfjax.parallel.adapters.constructed import UNTRACEABLE
from hfjax.parallel.adapters.model_template import ModelTemplate
from hfjax.parallel.jaxprs.model_mesh import without_mesh
from hfjax.sharding.layout import Layout
from hfjax.utils.keywords import check_keywords, name_hint
from hfjax.utils.tables import first_lines
from hfjax.weights.pretrained import Pretrained

HEAD = "vocab"  # the name of the outputs of a head, whose kernel is used without its map


@dataclass(frozen=True, eq=False)
class Lora:
    """A model with adapters, as `hfjax.layout` takes it; its own parameters are frozen.

    Attributes:
        base: The model: a function of `nnx.Rngs`, or what `hfjax.pretrained` returns.
        options: Rank, targets and the rest.
        files: The files of the adapters, where `load_adapter` has read them.

    Example:
        >>> import hfjax
        >>> from hfjax.models.gpt import GPT, GPTConfig
        >>> model = hfjax.adapters.lora(lambda rngs: GPT(GPTConfig.tiny(), rngs=rngs), rank=4)
        >>> [adapter.map.name for adapter in model.adapters][:2]
        ['layers/attention/out', 'layers/attention/qkv']
    """

    base: Callable[[nnx.Rngs], Any] | Pretrained
    options: LoraOptions = field(default_factory=LoraOptions)
    files: AdapterFiles | None = None

    def __call__(self, rngs: nnx.Rngs) -> Any:
        """Return the model with adapters, at first equal to the model without.

        Args:
            rngs: The random number generators.
        """
        model = self._create_base(rngs)
        if self._any_model is not None:
            return model
        linears = dict(_find_linears(model))
        chosen = self._choose([m for path, x in linears.items() for m in _maps_of(path, x)])
        by_path: dict[str, list[Adapter]] = {}
        for adapter in chosen:
            by_path.setdefault(adapter.map.path, []).append(adapter)
        for path, adapters in by_path.items():
            linears[path].lora = nnx.data(self._make_module(linears[path], adapters, rngs))
        return model

    def _create_base(self, rngs: nnx.Rngs) -> Any:
        return self.base.create(rngs) if isinstance(self.base, Pretrained) else self.base(rngs)

    @cached_property
    def maps(self) -> tuple[LinearMap, ...]:
        """All linear maps that may have an adapter."""
        return self._own_maps if self._any_model is None else self._any_model.matrices

    @cached_property
    def _any_model(self) -> AnyModel | None:
        """The parameters of a model without hfjax's linear maps."""
        if isinstance(self.base, Pretrained) or self._own_maps:
            return None
        if self.options.dropout:
            raise ValueError(
                f"lora: dropout={self.options.dropout}: the model has no linear maps of hfjax's, "
                "and is given W + s A B, beside which no input of A can be dropped. Leave dropout "
                "out, or make its maps hfjax.models.layers.Linear."
            )
        return find_matrices(self.base, self.options.dims)

    @cached_property
    def _own_maps(self) -> tuple[LinearMap, ...]:
        """hfjax's linear maps of the model."""
        maps: list[LinearMap] = []

        def find() -> None:
            model = self._create_base(nnx.Rngs(0))
            maps.extend(m for path, linear in _find_linears(model) for m in _maps_of(path, linear))

        try:
            with nnx.use_eager_sharding(False):  # names of axes are for the layout's mesh
                jax.eval_shape(find)
        except UNTRACEABLE:  # no model of hfjax's
            return ()
        return tuple(maps)

    @cached_property
    def adapters(self) -> tuple[Adapter, ...]:
        """All adapters, sorted by path."""
        return tuple(sorted(self._choose(self.maps), key=lambda adapter: adapter.map.name))

    def check_dims(self) -> None:
        """Refuse letters of dimensions for hfjax's own linear maps, which have names."""
        if self.options.dims and self._any_model is None:
            raise ValueError(
                f"lora: dims={dict(self.options.dims)}: the model's linear maps are hfjax's, which "
                "know their inputs and outputs. Leave dims out."
            )

    def is_frozen(self, path: str) -> bool:
        """Return whether a parameter is not trained.

        Args:
            path: The path of the parameter.
        """
        is_saved = any(_matches(path, pattern) for pattern in self.options.modules_to_save)
        return not is_saved and not self.is_adapter(path)

    def is_adapter(self, path: str) -> bool:
        """Return whether a parameter is an adapter's.

        Args:
            path: The path of the parameter.
        """
        return path.rpartition("/")[0] in self._adapter_paths

    def merge(self, layout: Layout, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the parameters of the base with the adapters merged into its kernels.

        Args:
            layout: The layout of the parameters.
            params: The parameters by path, in the model's order.
        """
        if self._any_model is not None:
            return merge_matrices(self.adapters, params)
        return MergedParams(layout, params, self.adapters)

    def add_adapters(
        self, names: Mapping[str, tuple], template: ModelTemplate, forward: Callable | None
    ) -> tuple[Mapping[str, tuple], ModelTemplate]:
        """Return names of dimensions, and the template, with the adapters of any model.

        Args:
            names: Names of the model's own dimensions.
            template: The model's template.
            forward: As `hfjax.layout` has it.
        """
        self._check_saved([path for path in template.parameters if not self.is_adapter(path)])
        if self._any_model is None:
            return names, template
        gaussian = self.options.init == "gaussian"
        return add_adapters(names, template, forward, self.adapters, gaussian)

    def _check_saved(self, paths: Sequence[str]) -> None:
        """Refuse patterns of parameters to train whole that match none."""
        for pattern in self.options.modules_to_save:
            if not any(_matches(path, pattern) for path in paths):
                raise ValueError(
                    f"lora: modules_to_save: {pattern!r} matches no parameter of the model (a head "
                    "that is tied to the embedding is tokens). Its parameters:\n  "
                    + "\n  ".join(first_lines(sorted(paths)))
                    + name_hint(pattern, paths)
                )

    @cached_property
    def base_weights(self) -> BaseWeights | None:
        """The weights of the base, where that is of `hfjax.pretrained`."""
        if not isinstance(self.base, Pretrained):
            return None
        return BaseWeights(
            self.base, {adapter.map.name: adapter.scale for adapter in self.adapters}
        )

    @cached_property
    def weights(self) -> BaseWeights | AdapterWeights:
        """The weights to pass as `hfjax.init(layout, parameters=…)`.

        Adapters are those of their files, or drawn from the seed.
        """
        if self.base_weights is None:
            raise ValueError(
                "lora(model).weights: the model is a function, whose weights are those of a seed: "
                "hfjax.init(layout, seed). hfjax.pretrained(FOLDER) has weights."
            )
        if self.files is not None:
            return AdapterWeights(self.base_weights, self.files)
        return self.base_weights

    @cached_property
    def _adapter_paths(self) -> set[str]:
        return {adapter.map.adapter_path for adapter in self.adapters}

    def _choose(self, maps: Sequence[LinearMap]) -> list[Adapter]:
        """Return the adapters of the maps that the targets name."""
        targets = self.options.targets
        names = [m.name for m in maps]
        if targets == (ALL_LINEAR,):
            targets = ("*",)
            self._check_targets(names)
        options = self.options
        patterns = {
            **dict.fromkeys(options.alpha_pattern, "alpha_pattern"),
            **dict.fromkeys(options.rank_pattern, "rank_pattern"),
            **dict.fromkeys(targets, "targets"),
        }
        for pattern, option in patterns.items():
            if not any(_matches(name, pattern) for name in names):
                self._refuse_matrix(option, pattern, names)
                raise ValueError(
                    f"lora: {option}: {pattern!r} matches no linear map of the model (norms, "
                    "embeddings, heads and experts have no adapters: modules_to_save trains the "
                    "first three whole). Its maps:\n  "
                    + "\n  ".join(first_lines(sorted(names)))
                    + name_hint(pattern, names)
                )
        is_target = lambda m: any(_matches(m.name, pattern) for pattern in targets)
        return [_make_adapter(m, self.options) for m in maps if is_target(m)]

    def _check_targets(self, names: Sequence[str]) -> None:
        """Refuse to adapt all linear maps of a model in which nothing tells them apart."""
        if self._any_model is not None:
            raise ValueError(
                f'lora: targets="{ALL_LINEAR}": the model has no linear maps of hfjax\'s, and a '
                "table of embeddings is a matrix, too. Give patterns of paths, for instance "
                'targets=["*/kernel"]. The matrices of the model:\n  '
                + "\n  ".join(first_lines(sorted(names)))
            )

    def _refuse_matrix(self, option: str, pattern: str, names: Sequence[str]) -> None:
        """Refuse a pattern that matches no matrix of a model without hfjax's linear maps."""
        if self._any_model is None:
            return
        others = [path for path in self._any_model.others if _matches(path, pattern)]
        matching = (
            f"only {', '.join(first_lines(sorted(others)))}, and vectors have no adapters "
            "(modules_to_save trains them whole)"
            if others
            else "no parameter"
        )
        raise ValueError(
            f"lora: {option}: {pattern!r} matches {matching}. The matrices of the model:\n  "
            + "\n  ".join(first_lines(sorted(names)))
            + name_hint(pattern, names)
        )

    def _make_module(
        self, linear: Linear, adapters: Sequence[Adapter], rngs: nnx.Rngs
    ) -> LowRank | LowRankParts:
        """Return the adapters of a linear map, stacked as it is."""
        axes = linear.kernel.get_metadata("axes")
        stack = linear.kernel[...].shape[: -len(axes)]
        opts = self.options

        def create(rngs: nnx.Rngs) -> LowRank | LowRankParts:
            modules = {
                adapter.map.part: LowRank(
                    *(adapter.map, adapter.rank, adapter.scale, opts.dropout),
                    gaussian=opts.init == "gaussian",
                    rngs=rngs,
                )
                for adapter in adapters
            }
            return LowRankParts(dict(linear.parts), modules) if linear.parts else modules[""]

        for count in reversed(stack):
            create = _stacked(count, create)
        return create(rngs)


def _make_adapter(linear_map: LinearMap, options: LoraOptions) -> Adapter:
    """Return the adapter of a map; the first matching pattern wins."""
    rank = _first_match(linear_map, options.rank_pattern, options.rank)
    default_alpha = float(rank) if options.alpha is None else options.alpha
    alpha = _first_match(linear_map, options.alpha_pattern, default_alpha)
    if rank > (smaller := min(linear_map.sizes)):
        inputs, outputs = linear_map.sizes
        raise ValueError(
            f"lora: rank={rank} of {linear_map.name}, which has {inputs} inputs and {outputs} "
            f"outputs: at most {smaller} is of use. Choose a lower rank, or give this map a "
            f"smaller one by rank_pattern: {linear_map.name}, {smaller}."
        )
    scale = alpha / math.sqrt(rank) if options.use_rslora else alpha / rank
    return Adapter(linear_map, rank, alpha, scale)


def _stacked(count: int, create: Callable) -> Callable:
    return lambda rngs: stack_layers(count, create, rngs)


def _find_linears(model: Any) -> Iterator[tuple[str, Linear]]:
    """Yield the linear maps of a model that may have adapters, by path."""
    modules = nnx.iter_modules(model) if isinstance(model, nnx.Module) else ()
    for keys, module in modules:
        if isinstance(module, Linear) and module.between[1] != HEAD:
            yield "/".join(map(str, keys)), module


def _maps_of(path: str, linear: Linear) -> Iterator[LinearMap]:
    """Yield the maps of a module."""
    axes = linear.kernel.get_metadata("axes")
    shape = linear.kernel[...].shape[-len(axes) :]
    if not linear.parts:
        yield LinearMap(path, "", shape, axes, linear.inputs)
    dim, start = linear.inputs + 1, 0
    for part, size in linear.parts:
        part_shape = (*shape[:dim], size, *shape[dim + 1 :])
        yield LinearMap(path, part, part_shape, axes, linear.inputs, start)
        start += size


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a path, or the names of a part of it.

    >>> _matches("layers/attention/qkv/q", "attention"), _matches("layers/mlp/up", "layers/att*")
    (True, False)
    """
    return any(fnmatchcase(f"/{name}/", form) for form in (f"/{pattern}/", f"*/{pattern}/*"))


def _first_match(linear_map: LinearMap, patterns: Mapping[str, Any], default: Any) -> Any:
    matching = (x for pattern, x in patterns.items() if _matches(linear_map.name, pattern))
    return next(matching, default)


@without_mesh
def lora(
    model: Callable[[nnx.Rngs], Any] | Pretrained,
    rank: int = 8,
    alpha: float | None = None,
    targets: str | Sequence[str] = ALL_LINEAR,
    **options: Any,
) -> Lora:
    """Return a model whose linear maps have adapters: W x + s B A x, of which A and B train.

    A model without hfjax's linear maps (`hfjax.models.layers.Linear`) of any framework is called
    with W + s A B in place of W: targets are paths of matrices, `["*/kernel"]`; nothing is dropped;
    the gradient of W is computed, as without adapters, for those of A and B. A matrix is [inputs,
    outputs], an array of more dimensions a stack of matrices [stack…, inputs, outputs], but for
    nnx's maps of several dimensions and where `dims` says otherwise; what is named bias or scale is
    none, unless `dims` has it.

    Args:
        model: A function of `nnx.Rngs` that returns a model, as `hfjax.layout` takes it, or what
            `hfjax.pretrained` returns.
        rank: The rank of A and B.
        alpha: s is alpha / rank. None: s = 1.
        targets: Patterns of linear maps, whole paths (`layers/attention/*`) or names in them
            (attention, q); or all-linear. `print(model.adapters)` shows them.
        options: `dropout` (of the adapters' inputs, 0), `use_rslora` (s is alpha / sqrt(rank)),
            `rank_pattern` and `alpha_pattern` ({pattern: value}), `modules_to_save` (patterns of
            parameters that train whole), `init` (of A: uniform or gaussian), `dims` (of a model
            without hfjax's linear maps, {pattern: letters}: s for a dimension of a stack, i for
            inputs, o for outputs; `{"*/query/kernel": "ioo", "*/weight": "oi"}`).

    Raises:
        ValueError: A pattern matches no linear map, or a rank exceeds the smaller side of one;
            dropout or all-linear of a model without hfjax's linear maps.

    Example:
        >>> import hfjax, jax, optax
        >>> from jax import numpy as jnp
        >>> from hfjax.models.gpt import GPT, GPTConfig
        >>> model = lambda rngs: GPT(GPTConfig.tiny(), rngs=rngs)
        >>> adapted = hfjax.adapters.lora(model, rank=4, alpha=8, targets=["layers/attention/*"])
        >>> layout = hfjax.layout(adapted, optax.adam(1e-3), hfjax.make_mesh(data=8), hfjax.DDP)
        >>> len(layout.gradient_bytes)
        4

        A model of another framework:

        >>> model = lambda rngs: {"up": rngs.params.normal((8, 64)), "down": jnp.ones((64, 8))}
        >>> adapted = hfjax.adapters.lora(model, rank=4, targets=["up", "down"])
        >>> forward = lambda w, x: jax.nn.relu(x @ w["up"]) @ w["down"]
        >>> layout = hfjax.layout(
        ...     adapted, optax.adam(1e-3), hfjax.make_mesh(data=8), hfjax.DDP, forward=forward
        ... )
        >>> sorted(layout.gradient_bytes)
        ['lora/down/a', 'lora/down/b', 'lora/up/a', 'lora/up/b']
    """
    check_keywords("lora", options, list(LoraOptions.__dataclass_fields__))
    names = (targets,) if isinstance(targets, str) else tuple(targets)
    for name in {"modules_to_save"} & options.keys():
        value = options[name]
        options[name] = (value,) if isinstance(value, str) else tuple(value)
    adapted = Lora(model, LoraOptions(rank, alpha, names, **options))
    adapted.check_dims()
    len(adapted.adapters)  # called for its checks
    return adapted
