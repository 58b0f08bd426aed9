"""Parse the YAML of configurations: numbers stay text, for the type of the field to interpret."""

from collections.abc import Hashable
from typing import Any, ClassVar

import yaml
from yaml.constructor import ConstructorError

from hfjax.utils.tables import quote

# What YAML 1.1 would guess: 5:8 is 308, 010 is 8, 3e-4 a text.
GUESSED_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp")}
MAX_EXPANDED = 100_000  # characters that aliases (`*name`, also after `<<`) may stand for


class Lined(dict):
    """A mapping that records the lines of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[Any, int] = {}


class _Loader(yaml.SafeLoader):
    """Reads numbers and dates as text; refuses duplicate keys."""

    yaml_implicit_resolvers: ClassVar = {
        first: [pair for pair in pairs if pair[0] not in GUESSED_TAGS]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> Lined:
    mapping = Lined()
    keys = set()
    for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
        if key.value in keys:
            raise ConstructorError(None, None, f"{quote(key.value)} is there twice", key.start_mark)
        keys.add(key.value)
    loader.flatten_mapping(node)  # what `<<` merges comes first
    for key, value in node.value:
        name = loader.construct_object(key, deep=True)
        if not isinstance(name, Hashable):
            raise ConstructorError(None, None, "a name is expected", key.start_mark)
        mapping[name] = loader.construct_object(value, deep=True)
        mapping.lines[name] = key.start_mark.line + 1
    return mapping


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


def _expanded_size(node: yaml.Node, sizes: dict[yaml.Node, int | None]) -> int:
    """Return the number of characters of a node with each alias written out."""
    if isinstance(node, yaml.ScalarNode):
        return 1 + len(node.value)
    if node not in sizes:
        sizes[node] = None  # until it is counted
        children = node.value
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in children for child in pair]
        sizes[node] = 1 + sum(_expanded_size(child, sizes) for child in children)
    if (size := sizes[node]) is None:
        raise ConstructorError(None, None, "found unconstructable recursive node", node.start_mark)
    return size


def _check_aliases(node: yaml.Node, text: str) -> None:
    """Refuse aliases of aliases that grow exponentially: each line may double the size."""
    if _expanded_size(node, {}) > len(text) + MAX_EXPANDED:
        problem = f"its aliases (*name), written out, are more than {MAX_EXPANDED} characters"
        raise ConstructorError(None, None, problem, node.start_mark)


def parse_yaml(text: str, label: str) -> Any:
    """Return parsed YAML, numbers as text; raise a ValueError with the line of a fault."""
    try:
        loader = _Loader(text)
        if (node := loader.get_single_node()) is None:
            return None
        _check_aliases(node, text)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as wrong:
        mark = wrong.problem_mark or wrong.context_mark
        line = "" if mark is None else f":{mark.line + 1}"
        raise ValueError(f"{label}{line} is no YAML: {wrong.problem or wrong.context}.") from None
    except RecursionError:
        raise ValueError(f"{label} is no YAML that can be read: it is nested too deeply.") from None
    except Exception as wrong:  # at a tag like !!int, PyYAML raises any error
        raise ValueError(f"{label} is no YAML: {quote(str(wrong).splitlines()[0])}.") from None
