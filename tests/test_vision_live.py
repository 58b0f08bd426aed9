"""With torchvision at hand: whole models have its names, its logits, and as good gradients.

Slow, and skipped where it is not installed; tests/vision.npz has what small ones computed before.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import hfjax
from hfjax.models.vision import deeplab, regnet, resnet, vit
from hfjax.models.vision.losses import classification_loss, segmentation_loss
from hfjax.utils.paths import join_path
from hfjax.weights.tensor_files import read_header
from hfjax.weights.vision_files import named_tensors, read_vision, with_weights, write_vision
from hfjax.weights.vision_rules import COUNTER, array_shapes, vision_table
from tests.test_vision_models import layout_of

torch = pytest.importorskip("torch")
torchvision: Any = pytest.importorskip("torchvision")
of_files: Any = pytest.importorskip("safetensors.torch")
theirs = torchvision.models

from tests.make_vision import loss_of  # noqa: E402

pytestmark = pytest.mark.slow

OF_REGNET = ("400mf", "800mf", "1_6gf", "3_2gf", "8gf", "16gf", "32gf", "128gf")
SEGMENTS = {"weights": None, "weights_backbone": None, "aux_loss": True}
MODELS: Mapping[str, tuple[Any, Callable]] = {
    **{f"resnet-{n}": (resnet, getattr(theirs, f"resnet{n}")) for n in (18, 34, 50, 101)},
    **{
        f"regnet-y-{size.replace('_', '.')}": (regnet, getattr(theirs, f"regnet_y_{size}"))
        for size in OF_REGNET
    },
    **{
        f"deeplabv3-resnet-{n}": (
            deeplab,
            partial(getattr(theirs.segmentation, f"deeplabv3_resnet{n}"), **SEGMENTS),
        )
        for n in (50, 101)
    },
    **{f"vit-{c}-16": (vit, getattr(theirs, f"vit_{c}_16")) for c in "bl"},
}
ENTRIES = {"deeplabv3-resnet101": 676, "resnet101": 626, "vit-b-16": 152}


@pytest.mark.parametrize("name", MODELS)
def test_each_tensor_of_a_whole_model_has_one_place(name, monkeypatch):
    module, make = MODELS[name]
    widths = theirs.regnet.BlockParams.from_init_params.__func__

    def real(kind, **sizes):  # widths are computed, whatever arrays are made of
        with torch.device("cpu"):
            return widths(kind, **sizes)

    monkeypatch.setattr(theirs.regnet.BlockParams, "from_init_params", classmethod(real))
    with torch.device("meta"):
        state = make().state_dict()
    wanted = {k: tuple(x.shape) for k, x in state.items() if not k.endswith(COUNTER)}
    pieces = list(vision_table(module.PRESETS[name]).expand())
    assert {piece.name: piece.rule.shape for piece in pieces} == wanted
    assert len({(piece.path, piece.index) for piece in pieces}) == len(pieces) == len(wanted)
    assert len(state) == ENTRIES.get(name, len(state))


def settled(model: Any, image: Any) -> Any:
    """Return a model whose running statistics are those of some images, and no rounding grows.

    Blocks add a third of what they make, and no variance is tiny (few rows have few means).
    """
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    last = (name for name in model.state_dict() if name.endswith(("bn3.weight", "f.c.1.weight")))
    for name in last:
        model.state_dict()[name].fill_(1 / 3)
    with torch.no_grad():
        model.train()(image)
    for name, x in model.state_dict().items():
        if name.startswith("heads."):  # which begin as zeros
            x.normal_(0, 0.1)
        if name.endswith("running_var"):
            x.clamp_(min=0.01)
    return model.eval()


def gradients(model: Any, image: Any, labels: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Return logits and the gradient of each parameter."""
    model.zero_grad()
    outputs = model(image)
    loss_of(outputs, labels).backward()
    return outputs, {name: x.grad.double().numpy() for name, x in model.named_parameters()}


def distance(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> float:
    """Return how far all gradients are from others, over the length of these."""
    square = lambda x: float((x**2).sum())
    apart = sum(square(found[name] - x) for name, x in wanted.items())
    return (apart / sum(map(square, wanted.values()))) ** 0.5


WHOLE = {
    "resnet101": (2, 224),
    "regnet-y-400mf": (2, 224),
    "vit-b-16": (2, 224),
    "deeplabv3-resnet101": (1, 321),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_model_goes_in_computes_as_torchvision_and_comes_out(name, tmp_path):
    module, make = MODELS[name]
    config, (rows, side) = module.PRESETS[name], WHOLE[name]
    torch.manual_seed(0)
    draw = np.random.default_rng(0)
    image = draw.normal(size=(max(rows, 2), side, side, 3)).astype(np.float32)
    of_torch = lambda x: torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))
    model = settled(make(), of_torch(image))
    image = image[:rows]
    segments = isinstance(config, deeplab.DeepLabConfig)
    labels = draw.integers(0, config.classes, image.shape[:3] if segments else rows)
    file = tmp_path / "model.safetensors"
    of_files.save_file(model.state_dict(), file)

    layout = layout_of(config)
    state = with_weights(layout, read_vision(file, config))
    ours = hfjax.to_model(layout, state)
    ours.eval()
    graph, parameters, rest = nnx.split(ours, nnx.Param, ...)
    loss = segmentation_loss if segments else partial(classification_loss, smoothing=0.1)
    batch = {"image": image, "label": labels}

    def run(parameters):
        outputs = nnx.merge(graph, parameters, rest, copy=True)(batch)
        mean = loss(outputs, batch)
        return mean.total / mean.weight, outputs

    (_, outputs), found = jax.jit(jax.value_and_grad(run, has_aux=True))(parameters)
    held = {join_path(keys): np.asarray(x[...]) for keys, x in nnx.to_flat_state(found)}
    others = {k: np.zeros(shape) for k, shape in array_shapes(config).items() if k not in held}
    found = dict(named_tensors({**others, **held}, config))

    logits, single = gradients(model, of_torch(image), torch.from_numpy(labels))
    as_tree = lambda x: dict(x) if isinstance(x, Mapping) else {"logits": x}
    for key, x in as_tree(logits).items():
        x = x.detach().numpy()
        x = x.transpose(0, 2, 3, 1) if segments else x
        apart = np.abs(np.asarray(as_tree(outputs)[key]) - x).max() / np.abs(x).max()
        print(name, key, "logits apart", apart, "of", np.abs(x).max())
        assert apart < 1e-4
    _, double = gradients(model.double(), of_torch(image).double(), torch.from_numpy(labels))
    own, torchs = distance(found, double), distance(single, double)
    print(name, "gradients apart", own, "torch's own", torchs)
    assert own < 2 * torchs

    out = tmp_path / "out.safetensors"
    write_vision(out, layout, state, config, like=file)
    written, before = of_files.load_file(out), of_files.load_file(file)
    assert written.keys() == before.keys()
    assert all(torch.equal(written[name], x) for name, x in before.items())
    assert len(read_header(out)) == len(model.state_dict())
