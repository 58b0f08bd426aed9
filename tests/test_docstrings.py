"""Docstrings of the public API: every argument is named in them, and every function is shown."""

import dataclasses
import importlib
import inspect
import re
from functools import reduce

import pytest

PUBLIC = (
    *("hfjax", "hfjax.analysis", "hfjax.compat", "hfjax.data", "hfjax.data.images"),
    *("hfjax.distributed", "hfjax.optimizers", "hfjax.trainer"),
)


def public_names():
    """Return package:name of each public name, of hfjax if it is there too."""
    for package in PUBLIC:
        for name in importlib.import_module(package).__all__:
            if package == "hfjax" or name not in importlib.import_module("hfjax").__all__:
                yield f"{package}:{name}"


MORE = """
hfjax.testing:assert_strategies_agree
hfjax.testing:strategies
hfjax.step.train_step:TrainStep
hfjax.models.layers:stack_layers
hfjax.models.layers:Dropout
hfjax.models.layers:NoConstraint
hfjax.models.layers:LocalOps
hfjax.models.gpt:GPTConfig
hfjax.models.llama:LlamaConfig
""".split()

ENGINE = "the engine calls it, users do not"
FIELDS = "a comment or a text beside each field says what it is"
TRACKER = "the user writes it: the class has an example"
ARGUMENTS = {  # whose arguments need no list, and why
    "hfjax.trainer:Tracker": TRACKER,
    "hfjax:Collectives": "hfjax.collectives makes it; the class says what its two fields are",
    "hfjax:Layout.parameter_of": ENGINE,
    "hfjax:Layout.working_dtype": ENGINE,
    "hfjax.compat:Partition": "hfjax.compat.partition makes it; " + FIELDS,
    "hfjax:Remat.check": ENGINE,
    "hfjax:Remat.policy": ENGINE,
    "hfjax.analysis:Transfers": "hfjax.analysis.host_transfers makes it",
    "hfjax.trainer:TrainConfig": FIELDS + ", and its docstring is what `hfjax train --help` shows",
}
WITH_A_RUN = "it needs a trained run: docs/training.md shows one"
HANDED = "the model's own layers call it: hfjax/models/gpt.py"
EXAMPLES = {  # what has no example, and why
    "hfjax:Layout.parameter_of": ENGINE,
    "hfjax:Layout.working_dtype": ENGINE,
    "hfjax:Remat.check": ENGINE,
    "hfjax:Remat.policy": ENGINE,
    "hfjax.trainer:RunComponents.answered": WITH_A_RUN,
    "hfjax.trainer:RunComponents.check_validation": WITH_A_RUN,
    "hfjax.trainer:Tracker.log": TRACKER,
    "hfjax.trainer:Tracker.start": TRACKER,
    "hfjax.trainer:RunComponents.precision_on": WITH_A_RUN,
    "hfjax.trainer:RunComponents.validated": WITH_A_RUN,
    "hfjax.trainer:RunComponents.written": WITH_A_RUN,
    "hfjax.trainer:TrainConfig": "`hfjax train --help` shows its docstring; `train` has one",
    "hfjax.models.layers:NoConstraint.axes": HANDED,
    "hfjax.models.layers:LocalOps.matmul": HANDED,
    "hfjax.models.layers:LocalOps.outputs": HANDED,
    "hfjax.models.layers:LocalOps.experts": HANDED,
    "hfjax.models.layers:LocalOps.sum_over_batch": HANDED,
    "hfjax.models.layers:LocalOps.add_router_metrics": HANDED,
}
SKIPPED = {  # whose example does not run here, and why
    "hfjax.analysis:target_devices": "it needs wheels for CUDA; tests/test_targets.py",
    "hfjax:export": "it needs a model's folder; docs/pretrained.md has one that is run",
    "hfjax:pretrained": "it needs a model's folder; docs/pretrained.md has one that is run",
    "hfjax.trainer:train": "a run takes ten seconds; docs/training.md has one that is run",
}


def public():
    """Return {name: object} of all public functions and classes, and of methods with arguments."""
    names = [*public_names()]
    found = {name: the(name) for name in names + MORE}
    found = {name: x for name, x in found.items() if inspect.isclass(x) or inspect.isfunction(x)}
    classes = [(name, x) for name, x in found.items() if inspect.isclass(x)]
    return found | {f"{name}.{m}": the(f"{name}.{m}") for name, x in classes for m in methods(x)}


def the(name):
    module, _, attributes = name.partition(":")
    return reduce(getattr, attributes.split("."), importlib.import_module(module))


def methods(kind):
    """Return the names of a class's own public methods that take arguments."""
    fields = {field.name for field in dataclasses.fields(kind)} if is_data(kind) else set()
    public = [name for name in dir(kind) if name == "__call__" or not name.startswith("_")]
    ours = [name for name in public if is_ours(inspect.getattr_static(kind, name))]
    return [name for name in ours if name not in fields and arguments(getattr(kind, name))]


def is_data(kind):
    return dataclasses.is_dataclass(kind)


def is_ours(attribute):
    function = getattr(attribute, "__func__", attribute)
    return inspect.isfunction(function) and function.__module__.startswith("hfjax")


def arguments(function):
    """Return the names of all arguments but self."""
    if inspect.isclass(function):
        if issubclass(function, tuple):
            return list(getattr(function, "_fields"))  # noqa: B009  (of a NamedTuple)
        if function.__init__ is object.__init__:
            return []
        function = function.__init__
    return [name for name in inspect.signature(function).parameters if name != "self"]


def told(name):
    """Return the docstring; of a class also that of its __init__."""
    thing = the(name)
    text = inspect.getdoc(thing) or ""
    if inspect.isclass(thing):
        text += "\n" + (inspect.getdoc(thing.__init__) or "")
    return text


def is_shown(name):
    """Return whether there is an example: in the docstring, or of a method in that of its class."""
    if ">>>" in told(name):
        return True
    kind, dot, method = name.rpartition(".") if "." in name.partition(":")[2] else (name, "", "")
    lines = re.findall(r"^ *(?:>>>|\.\.\.) .*", told(kind), re.MULTILINE) if dot else []
    return any(method == "__call__" or f".{method}(" in line for line in lines)


@pytest.mark.parametrize("name", sorted(public().keys() - ARGUMENTS.keys()))
def test_every_public_function_says_what_its_arguments_are(name):
    _, _, section = re.sub(r"\bAttributes:", "Args:", told(name)).partition("Args:\n")
    listed = re.findall(r"^ +(\w+): \S", section, re.MULTILINE)
    assert [x for x in arguments(the(name)) if x not in listed] == []


@pytest.mark.parametrize("name", sorted(public().keys() - EXAMPLES.keys()))
def test_every_public_function_has_an_example(name):
    assert is_shown(name)


@pytest.mark.parametrize("name", public())
def test_every_example_runs_but_those_that_cannot_here(name):
    assert ("doctest: +SKIP" in told(name)) == (name in SKIPPED)


def test_the_exceptions_are_public_and_needed():
    assert ARGUMENTS.keys() | EXAMPLES.keys() | SKIPPED.keys() <= public().keys()
    assert not [name for name in EXAMPLES if is_shown(name)]
