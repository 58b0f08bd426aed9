"""Names at the front door: what can be reached, and what is said of a name that is not there."""

import importlib
import pkgutil
import re
import subprocess
import sys
from dataclasses import fields
from functools import reduce
from types import ModuleType

import jax
import numpy as np
import optax
import pytest

import hfjax
from hfjax import DDP, FSDP, ZERO1, Schedule
from hfjax.__main__ import main
from hfjax.models.gpt import next_token_loss
from hfjax.utils.renamed import NAMES
from tests.small_gpt import mlp_layout, tokens
from tests.workers import environment


def told(source):
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_parts_of_hfjax_are_there_once_they_are_asked_for():
    later = ["hfjax.checkpoint", "hfjax.data", "hfjax.models", "hfjax.trainer", "hfjax.testing"]
    heavy = ["grain", "tyro", "orbax", "jax.experimental.mosaic", *later]
    bare = "import hfjax, hfjax.__main__, hfjax.cli.launch, sys; print('jax' in sys.modules)"
    assert told(bare) == ["False"]
    source = (
        "import hfjax, sys; hfjax.train_step\n"
        f"print([name for name in {heavy} if name in sys.modules])\n"
        f"print(all(name[6:] in dir(hfjax) for name in {later}))\n"
        "print(hfjax.testing.strategies.__name__, hfjax.data.Loader.__name__)\n"
        "print(all(name in dir(hfjax) and getattr(hfjax, name) for name in hfjax.__all__))\n"
        "import hfjax.models.gpt\n"
        "print(hfjax.models.gpt.GPT.__name__, hfjax.trainer.generate is hfjax.generate)\n"
        "from hfjax import *\n"
        "print(generate.__name__)\n"
    )
    assert told(source) == "[] True strategies Loader True GPT True generate".split()
    with pytest.raises(AttributeError, match="module 'hfjax' has no attribute 'nothing'"):
        getattr(hfjax, "nothing")  # noqa: B009  pyright knows that it is not there
    for name, near in {"FDSP": "FSDP", "fsdp": "FSDP", "train_stp": "train_step"}.items():
        with pytest.raises(AttributeError, match=rf"'{name}'\. Did you mean {near}\?"):
            getattr(hfjax, name)


def packages():
    """Return the names of hfjax and of all packages in it."""
    walked = pkgutil.walk_packages(hfjax.__path__, "hfjax.")
    return ["hfjax", *(found.name for found in walked if found.ispkg)]


@pytest.mark.parametrize("package", packages())
def test_no_module_has_the_name_of_something_its_package_has(package):
    """Whoever imports such a module by its name would be given the other thing, or it the other."""
    found = importlib.import_module(package)
    exported = set(getattr(found, "__all__", []))
    exported |= {name for name, value in vars(found).items() if not isinstance(value, ModuleType)}
    modules = {inside.name for inside in pkgutil.iter_modules(found.__path__)}
    assert sorted(exported & modules) == []


def test_the_version_is_that_of_the_project(capsys, monkeypatch):
    assert f'version = "{hfjax.__version__}"' in open("pyproject.toml").read()
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hfjax {hfjax.__version__}\n"

    def missing(name):
        raise version.PackageNotFoundError(name)

    from hfjax.utils import version

    monkeypatch.setattr(version, "installed", missing)
    assert version.version() == hfjax.__version__


def test_a_misspelt_command_is_told_the_nearest(capsys):
    assert main(["trian"]) == 2
    assert "hfjax trian: no such command. Did you mean train?" in capsys.readouterr().err


def small(strategy, sizes):
    count = int(np.prod(list(sizes.values())))
    return mlp_layout(strategy, sizes, devices=jax.devices()[:count])


LAYOUT = small(DDP, {"data": 2})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda **word: hfjax.train_step(LAYOUT, next_token_loss, **word),
            "train_step has no keyword 'acumulate'. Did you mean gradient_acc.* All: grad",
        ),
        (lambda **word: hfjax.Execution(**word), "Execution has no .* Did you mean gradient_acc"),
        (
            lambda **word: hfjax.eval_step(LAYOUT, next_token_loss, **word),
            "eval_step has no .* All: layout, loss, precision, schedule, compiler_options, kernels",
        ),
        (lambda **word: hfjax.predict_step(LAYOUT, **word), "predict_step has no .* layout, forw"),
        (lambda **word: hfjax.init(LAYOUT, **word), "init has no .* seed, schedule, parameters"),
        (
            lambda **word: hfjax.layout(dict, optax.sgd(1), LAYOUT.mesh, DDP, **word),
            "layout has no .* All: model_init, optimizer, mesh, strategy, forward, axes, example",
        ),
        (lambda **word: DDP.edit(**word), "Strategy.edit has no keyword .* All: name, parameters"),
        (lambda **word: Schedule("1f1b", **word), "Schedule has no .* All: name, microbatches"),
        (lambda **word: hfjax.Precision(**word), "Precision has no .* All: compute, gather"),
    ],
)
def test_a_misspelt_keyword_is_told_those_that_there_are(call, message):
    with pytest.raises(TypeError, match=message):
        call(acumulate=2)


def test_train_step_says_what_the_fields_of_an_execution_mean():
    lines = (hfjax.train_step.__doc__ or "").splitlines()
    for field in fields(hfjax.Execution):
        assert any(line.strip().startswith(f"{field.name}: ") for line in lines), field.name
    for name in (line.partition(":")[0].strip() for line in lines if line.startswith(12 * " ")):
        assert " " in name or not name.isidentifier() or hasattr(hfjax.Execution(), name), name


def test_true_is_no_number():
    for name in ("gradient_accumulation_steps", "max_skipped", "max_grad_norm"):
        word: dict = {name: True}
        with pytest.raises(ValueError, match=f"{name}=True: a positive"):
            hfjax.Execution(**word)
    for name in ("microbatches", "chunks"):
        word = {"microbatches": 2, name: True}
        with pytest.raises(ValueError, match=f"{name}=True: a positive"):
            Schedule("interleaved", **word)


@pytest.mark.parametrize(("strategy", "sizes"), [(FSDP, {"fsdp": 4}), (ZERO1, {"data": 4})])
@pytest.mark.short("strategy0-sizes0")
def test_a_state_of_another_layout_is_told_with_both(strategy, sizes):
    state, batch = hfjax.init(small(strategy, sizes)), tokens(rows=8)
    message = (
        r"made with another layout: params.* lies as .* on (fsdp|data)=4, and this layout \(DDP"
    )
    with pytest.raises(ValueError, match=f"{message} on data=2\\) has it as P.*jax.device_put"):
        hfjax.train_step(LAYOUT, next_token_loss)(state, batch)
    moved = jax.device_put(state, LAYOUT.shardings())
    hfjax.train_step(LAYOUT, next_token_loss)(moved, batch)


def test_a_name_of_before_says_what_it_is_now():
    for old, new in NAMES.items():
        with pytest.raises(AttributeError, match=rf"hfjax\.{old} is {re.escape(new)} now\."):
            getattr(hfjax, old)
        reduce(getattr, new.split(".")[1:], hfjax)
