"""The tensors of peft's files: their rules follow from those of the base's matrices.

A is [rank, inputs] in a file and [*inputs, rank] here, B is [outputs, rank] and [rank, *outputs]:
inputs and outputs are split and ordered as those of the matrix. Modules that train whole have the
base's own rules.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from hfjax.adapters.low_rank import A, Adapter, B, LinearMap
from hfjax.weights.tensor_rules import Rule, TensorMapping

PREFIX = "base_model.model."
WEIGHT = ".weight"
KERNEL = "kernel"


def matrices_of(
    maps: Iterable[LinearMap], base: Iterable[TensorMapping]
) -> dict[str, list[TensorMapping]]:
    """Return the base's matrices of each linear map, by its name: one, or one of each layer.

    Args:
        maps: The linear maps.
        base: The mappings of the base's tensors.
    """
    by_place: dict[tuple[str, int], list[TensorMapping]] = {}
    for mapping in base:
        by_place.setdefault((mapping.path, mapping.rule.start), []).append(mapping)
    return {m.name: by_place[f"{m.path}/{KERNEL}", m.start] for m in maps}


def module_name(mapping: TensorMapping) -> str:
    """Return transformers' name of the module that has a tensor.

    Args:
        mapping: The mapping of the tensor.
    """
    return mapping.name.rpartition(".")[0]


def has_inputs_first(rule: Rule, inputs: int) -> bool:
    """Return whether a matrix is [inputs, outputs] in the file, as those of GPT-2.

    Args:
        rule: The rule of the matrix.
        inputs: How many dimensions of ours are inputs.
    """
    return min(rule.order[:inputs]) == 0


def adapter_rules(base: Rule, adapter: Adapter) -> tuple[Rule, Rule]:
    """Return the rules of A and of B.

    Args:
        base: The rule of the matrix.
        adapter: Its adapter.
    """
    linear_map, rank = adapter.map, adapter.rank
    ours = f"{base.ours.removesuffix(KERNEL)}lora/{linear_map.part}".rstrip("/")
    theirs = PREFIX + base.theirs.removesuffix(WEIGHT)
    input_dims, output_dims = base.order[: linear_map.inputs], base.order[linear_map.inputs :]
    in_sizes, in_order = _sizes_and_order(base, input_dims)
    out_sizes, out_order = _sizes_and_order(base, output_dims)
    in_size, out_size = linear_map.sizes
    more = {"layers": base.layers, "transform": base.transform}
    return (
        Rule(
            *(f"{theirs}.lora_A{WEIGHT}", f"{ours}/{A}", (rank, in_size), (rank, *in_sizes)),
            *((*(1 + i for i in in_order), 0),),
            **more,
        ),
        Rule(
            *(f"{theirs}.lora_B{WEIGHT}", f"{ours}/{B}", (out_size, rank), (*out_sizes, rank)),
            *((len(out_order), *out_order),),
            **more,
        ),
    )


def _sizes_and_order(rule: Rule, dims: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of some dimensions of a view in the file's order, and their order in ours.

    >>> _sizes_and_order(Rule("", "", (6, 8), (3, 2, 8), (2, 1, 0)), (1, 0))
    ((3, 2), (1, 0))
    """
    in_file = sorted(dims)
    return tuple(rule.view[i] for i in in_file), tuple(map(in_file.index, dims))


def adapter_mappings(
    adapter: Adapter, matrices: Sequence[TensorMapping]
) -> Iterator[TensorMapping]:
    """Yield the mappings of an adapter's tensors, A and B of each layer.

    Args:
        adapter: The adapter.
        matrices: The mappings of its map's matrices.
    """
    for matrix in matrices:
        module = PREFIX + module_name(matrix)
        for rule, name in zip(adapter_rules(matrix.rule, adapter), (A, B), strict=True):
            yield TensorMapping(
                *(rule, f"{module}.lora_{name.upper()}{WEIGHT}"),
                *(f"{adapter.map.adapter_path}/{name}", matrix.index),
            )


def saved_mapping(base: TensorMapping) -> TensorMapping:
    """Return the mapping of a tensor that trains whole, for peft's file.

    Args:
        base: The mapping of the tensor in the base's files.
    """
    twin = None if base.rule.twin is None else PREFIX + base.rule.twin
    rule = replace(base.rule, theirs=PREFIX + base.rule.theirs, twin=twin)
    return TensorMapping(rule, PREFIX + base.name, base.path, base.index)


def shortest_suffixes(chosen: Collection[str], modules: Collection[str]) -> list[str]:
    """Return names' ends which are those of the chosen modules and of no others.

    Args:
        chosen: The names of the chosen modules.
        modules: The names of all modules.

    Example:
        >>> from hfjax.adapters.peft_rules import shortest_suffixes
        >>> modules = ["h.0.attn.c_proj", "h.0.mlp.c_proj", "h.0.attn.c_attn"]
        >>> shortest_suffixes(["h.0.attn.c_proj", "h.0.attn.c_attn"], modules)
        ['attn.c_proj', 'c_attn']
    """
    counts = Counter(suffix for name in modules for suffix in _suffixes(name))
    chosen_counts = Counter(suffix for name in chosen for suffix in _suffixes(name))
    own = lambda name: next(x for x in _suffixes(name) if counts[x] == chosen_counts[x])
    return sorted({own(name) for name in chosen})


def _suffixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[-count:])


def group_suffixes(values: Mapping[str, float], default: float) -> dict[str, float]:
    """Return a pattern {names' end: value} for the modules whose value is not the default.

    Args:
        values: The value of each module.
        default: The value of the others.
    """
    pattern: dict[str, float] = {}
    for value in sorted({*values.values()} - {default}):
        chosen = [name for name, x in values.items() if x == value]
        pattern |= dict.fromkeys(shortest_suffixes(chosen, values), value)
    return pattern
