"""The rules that map torchvision's tensors to hfjax's vision models.

The names are those of torchvision's state_dict(), in its order; shapes are those of our model, with
kernels transposed from HWIO to torch's OIHW. `num_batches_tracked` has no rule: nothing reads it.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from flax import nnx

from hfjax.models.vision.deeplab import DeepLab, DeepLabConfig
from hfjax.models.vision.regnet import RegNet, RegNetConfig
from hfjax.models.vision.resnet import ResNet, ResNetConfig
from hfjax.models.vision.vision_config import VisionConfig
from hfjax.models.vision.vit import ViT, ViTConfig
from hfjax.utils.paths import join_path
from hfjax.weights.tensor_rules import Rule, RuleTable, Shape, copy_rule, transpose_rule

COUNTER = "num_batches_tracked"
HEADS = ("fc", "classifier/outer", "auxiliary/outer")  # modules with a class dimension
NORM = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
Pairs = Iterator[tuple[str, str, str]]  # kind, name in the file, our path


def vision_table(config: VisionConfig) -> RuleTable:
    """Return the rules that map torchvision's model of a configuration to ours.

    Args:
        config: The model's ResNetConfig, RegNetConfig, DeepLabConfig or ViTConfig.

    Example:
        >>> from hfjax.models.vision.resnet import ResNetConfig
        >>> from hfjax.weights.vision_rules import vision_table
        >>> rule = vision_table(ResNetConfig.preset("resnet18")).rules[0]
        >>> rule.theirs, rule.shape, rule.ours, rule.block
        ('conv1.weight', (64, 3, 7, 7), 'stem/conv/kernel', (7, 7, 3, 64))
    """
    shapes = array_shapes(config)
    rules = [
        rule for pair in _FAMILIES[_family(config)][1](config) for rule in _rules(pair, shapes)
    ]
    return RuleTable(rules, {"layer": getattr(config, "layers", 1)}, ignored=(f"*.{COUNTER}",))


def model_factory(config: VisionConfig) -> Callable[[nnx.Rngs], nnx.Module]:
    """Return the function of `nnx.Rngs` that creates the model of a configuration."""
    model = _FAMILIES[_family(config)][0]
    return lambda rngs: model(config, rngs=rngs)


def array_shapes(config: VisionConfig) -> Mapping[str, Shape]:
    """Return the shape of each parameter and statistic of a model, by path."""
    return {path: shape for path, (_, shape) in _array_specs(config).items()}


@cache
def _array_specs(config: VisionConfig) -> dict[str, tuple[type, Shape]]:
    model = nnx.eval_shape(lambda: model_factory(config)(nnx.Rngs(0)))
    variables = nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.BatchStat)))
    return {join_path(keys): (type(x), tuple(x.shape)) for keys, x in variables}


def _family(config: VisionConfig) -> type:
    """Return the type of a configuration; refuse one of an unknown model."""
    if type(config) not in _FAMILIES:
        known = ", ".join(kind.__name__ for kind in _FAMILIES)
        raise ValueError(f"config={config!r}: one of {known} is expected.")
    return type(config)


def _rules(pair: tuple[str, str, str], shapes: Mapping[str, Shape]) -> Iterator[Rule]:
    """Yield the rules of one (kind, name, path) entry; the kind selects the function."""
    kind, theirs, ours = pair
    if kind == "norm":
        for name, our_name in NORM.items():
            if (path := f"{ours}/{our_name}") in shapes:
                yield copy_rule(f"{theirs}.{name}", path, *_layer_shape(shapes, path))
    elif kind == "attention":
        yield from _attention_rules(theirs, ours, _layer_shape(shapes, f"{ours}/qkv/kernel"))
    elif kind == "first":
        shape = _layer_shape(shapes, ours)
        yield Rule(theirs, ours, (1,) * (3 - len(shape)) + shape, shape, tuple(range(len(shape))))
    else:
        path = f"{ours}/kernel"
        yield {"conv": _conv_rule, "linear": _linear_rule}[kind](
            f"{theirs}.weight", path, _layer_shape(shapes, path)
        )
        if (path := f"{ours}/bias") in shapes:
            yield copy_rule(f"{theirs}.bias", path, *_layer_shape(shapes, path))


def _layer_shape(shapes: Mapping[str, Shape], path: str) -> Shape:
    """Return the shape of one layer's array."""
    stacked = path.startswith("layers/") and not path.split("/")[1].isdigit()
    return shapes[path][stacked:]


def _conv_rule(theirs: str, ours: str, shape: Shape) -> Rule:
    torch_shape = tuple(shape[i] for i in (3, 2, 0, 1))
    return Rule(theirs, ours, torch_shape, torch_shape, (2, 3, 1, 0), transform="OIHW to HWIO")


def _linear_rule(theirs: str, ours: str, shape: Shape) -> Rule:
    return transpose_rule(theirs, ours, shape[1], shape[0])


def _attention_rules(theirs: str, ours: str, qkv: Shape) -> Iterator[Rule]:
    """Yield the rules of attention: torch packs queries, keys and values, ours has heads first."""
    embed, heads, three, width = qkv
    out_features, view = three * embed, (three, heads, width)
    how = "transpose, heads first"
    yield Rule(
        *(f"{theirs}.in_proj_weight", f"{ours}/qkv/kernel", (out_features, embed)),
        *((*view, embed), (3, 1, 0, 2)),
        transform=how,
    )
    yield Rule(
        *(f"{theirs}.in_proj_bias", f"{ours}/qkv/bias", (out_features,), view, (1, 0, 2)),
        transform="heads first",
    )
    yield Rule(
        *(f"{theirs}.out_proj.weight", f"{ours}/out/kernel", (embed, embed)),
        *((embed, heads, width), (1, 2, 0)),
        transform=how,
    )
    yield copy_rule(f"{theirs}.out_proj.bias", f"{ours}/out/bias", embed)


# -- names of each family's modules ---------------------------------------------------------------


def _resnet_pairs(config: ResNetConfig) -> Pairs:
    yield from _backbone_pairs(config, "")
    yield "linear", "fc", "fc"


def _backbone_pairs(config: ResNetConfig, prefix: str) -> Pairs:
    yield from _conv_norm_pairs(f"{prefix}conv1", f"{prefix}bn1", "stem/conv", "stem/norm")
    for number, block in enumerate(config.blocks):
        theirs, ours = f"{prefix}layer{block.stage + 1}.{block.number}.", f"layers/{number}/"
        for n in range(1, 4 if config.block == "bottleneck" else 3):
            yield from _conv_norm_pairs(
                *(f"{theirs}conv{n}", f"{theirs}bn{n}"), *(f"{ours}conv{n}", f"{ours}norm{n}")
            )
        if not block.skips:
            yield from _numbered_pairs(f"{theirs}downsample", f"{ours}skip")


def _deeplab_pairs(config: DeepLabConfig) -> Pairs:
    yield from _backbone_pairs(config, "backbone.")
    pyramid, count = "classifier.0.convs", len(config.rates)
    yield from _numbered_pairs(f"{pyramid}.0", "pyramid/here")
    for n in range(count):
        yield from _numbered_pairs(f"{pyramid}.{n + 1}", f"pyramid/around/{n}")
    yield from _numbered_pairs(f"{pyramid}.{count + 1}", "pyramid/image", first=1)
    yield from _numbered_pairs("classifier.0.project", "pyramid/project")
    yield from _numbered_pairs("classifier", "classifier/inner", first=1)
    yield "conv", "classifier.4", "classifier/outer"
    if config.auxiliary:
        yield from _numbered_pairs("aux_classifier", "auxiliary/inner")
        yield "conv", "aux_classifier.4", "auxiliary/outer"


def _regnet_pairs(config: RegNetConfig) -> Pairs:
    yield from _numbered_pairs("stem", "stem")
    for number, block in enumerate(config.blocks):
        stage, ours = block.stage + 1, f"layers/{number}/"
        theirs = f"trunk_output.block{stage}.block{stage}-{block.number}."
        if not block.skips:
            yield from _numbered_pairs(f"{theirs}proj", f"{ours}skip")
        yield from _numbered_pairs(f"{theirs}f.a", f"{ours}narrow")
        yield from _numbered_pairs(f"{theirs}f.b", f"{ours}grouped")
        yield "conv", f"{theirs}f.se.fc1", f"{ours}weigh/squeeze"
        yield "conv", f"{theirs}f.se.fc2", f"{ours}weigh/excite"
        yield from _numbered_pairs(f"{theirs}f.c", f"{ours}widen")
    yield "linear", "fc", "fc"


def _numbered_pairs(theirs: str, ours: str, first: int = 0) -> Pairs:
    """Yield the entries of a convolution and its norm, which torch numbers."""
    yield from _conv_norm_pairs(
        f"{theirs}.{first}", f"{theirs}.{first + 1}", f"{ours}/conv", f"{ours}/norm"
    )


def _conv_norm_pairs(conv: str, norm: str, our_conv: str, our_norm: str) -> Pairs:
    yield "conv", conv, our_conv
    yield "norm", norm, our_norm


def _vit_pairs(config: ViTConfig) -> Pairs:
    layer, ours = "encoder.layers.encoder_layer_{layer}.", "layers/"
    yield "first", "class_token", "token"
    yield "conv", "conv_proj", "patches"
    yield "first", "encoder.pos_embedding", "positions"
    yield "norm", f"{layer}ln_1", f"{ours}norm1"
    yield "attention", f"{layer}self_attention", f"{ours}attention"
    yield "norm", f"{layer}ln_2", f"{ours}norm2"
    yield "linear", f"{layer}mlp.0", f"{ours}mlp/up"
    yield "linear", f"{layer}mlp.3", f"{ours}mlp/down"
    yield "norm", "encoder.ln", "norm"
    yield "linear", "heads.head", "fc"


_FAMILIES: Mapping[type, tuple[Any, Callable[[Any], Pairs]]] = {
    ResNetConfig: (ResNet, _resnet_pairs),
    RegNetConfig: (RegNet, _regnet_pairs),
    DeepLabConfig: (DeepLab, _deeplab_pairs),
    ViTConfig: (ViT, _vit_pairs),
}
