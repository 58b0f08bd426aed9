"""`hfjax COMMAND --help`: each flag in one line, its choices from the tables of the code."""

import re

import pytest

import hfjax
from docs.site.flags import Flag, help_of
from hfjax.__main__ import COMMANDS, main
from hfjax.analysis.targets import GPUS
from hfjax.cli.arguments import BOXES, CHOICES, LEFT_OUT, RARE, choices
from hfjax.hardware.machine import MACHINES
from hfjax.models.vision.preset_table import PRESETS
from hfjax.parallel.mesh import AXES
from hfjax.parallel.precision.dtypes import PRECISIONS
from hfjax.parallel.remat import WHAT
from hfjax.parallel.schedules.named import SCHEDULES
from hfjax.parallel.settings import CONTEXT_FORMS, CONTEXT_ORDERS, DISPATCH, KERNEL_WORDS
from hfjax.planner.make_plan import MAX_ENTRIES
from hfjax.trainer.model import presets

LIMIT = 90  # characters of a line, its default included; the words of a table apart
TAKE_CONFIG = ("train", "memory", "plan")
TRAINING = tuple(name for name in SCHEDULES if name != "forward")
STARTS = re.compile(r"(Of|And|With|How|What|Which|Who|Where|If|None)\b")  # of half a sentence
FORMER = re.compile(r"\bNone: |by default")


def faults(flags):
    """Return what is wrong with the help of flags, each with its name."""
    return [f"{flag.name}: {what}" for flag in flags for what in _faults(flag)]


def _faults(flag):
    text = re.sub(r" ?\((default: .*|required)\)$", "", flag.text)
    if not text:
        yield "no help"
    if "(default: None)" in flag.text:
        yield "the default None is not explained"
    if text.count("default") or flag.text.count("(default:") > 1:
        yield "its default is said twice"
    if FORMER.search(flag.text):
        yield "what None means is no default"
    if "{None}" in flag.invocation:
        yield "None among its values"
    if STARTS.match(text) or text.endswith("."):
        yield "neither a verb nor a noun phrase"
    if len(re.findall(r"[a-z)]\. ", text)) > 1:
        yield "more than two sentences"
    if (length := len(_without_tables(flag.text))) > LIMIT:
        yield f"{length} characters, more than {LIMIT}"


def _without_tables(text):
    for name in CHOICES:
        text = text.replace(", ".join(choices(name)), "")
    return text


@pytest.mark.parametrize("command", COMMANDS)
def test_each_flag_has_one_line_of_help(command):
    told, flags = help_of(command)
    assert faults(flag for flag in flags if flag.name != "-h") == []
    assert "-h" in {flag.name for flag in flags}
    assert not re.search(r"\bfake\b|tells?\b|wants?\b", told)
    about = told.split("\n\n")[1].strip()
    assert about[0].isupper(), "what the command does stands first"
    assert about.endswith(".")


def test_many_flags_are_read():
    names = {flag.name for flag in help_of("train")[1]}
    assert {"--steps", "--model.new-head", "--mesh.row", "--context.order", "-h"} <= names
    assert len(names) > 90
    assert [flag.name for flag in help_of("eval")[1]][:2] == ["PATH", "-h"]
    assert "--processes" in {flag.name for flag in help_of("launch")[1]}
    assert {"name", "--from"} <= {f.name for f in help_of("schedule")[1]}


@pytest.mark.parametrize(
    ("text", "invocation", "fault"),
    [
        ("(default: 3)", "--x INT", "no help"),
        ("Rows (default: None)", "--x INT", "the default None is not explained"),
        ("Rows; default 3 (default: 3)", "--x INT", "its default is said twice"),
        ("Rows; None: all (default: all)", "--x INT", "what None means is no default"),
        ("Rows (default: 3)", "--x {None}|INT", "None among its values"),
        ("How many rows (default: 3)", "--x INT", "neither a verb nor a noun phrase"),
        ("One thing. Another. More (default: 3)", "--x INT", "more than two sentences"),
        (f"{'Rows' * 20} (default: 3)", "--x INT", "93 characters, more than 90"),
    ],
)
def test_what_is_wrong_is_found_and_the_flag_named(text, invocation, fault):
    assert faults([Flag("options", invocation, text)]) == [f"--x: {fault}"]


@pytest.mark.parametrize(
    ("command", "flag", "words"),
    [
        *((command, "--pipeline.schedule", TRAINING) for command in ("train", "memory")),
        *((command, "--precision", tuple(PRECISIONS)) for command in TAKE_CONFIG),
        *((command, "--model.preset", tuple(presets())) for command in TAKE_CONFIG),
        *((command, "--model.preset", tuple(PRESETS)) for command in TAKE_CONFIG),
        *((command, "--remat", WHAT) for command in ("train", "memory")),
        ("plan", "--gpu", tuple(MACHINES)),
        ("schedule", "name", tuple(SCHEDULES)),
    ],
)
def test_the_help_lists_the_words_of_the_table(command, flag, words):
    texts = {flag.name: flag.text for flag in help_of(command)[1]}
    assert ", ".join(words) in texts[flag]


@pytest.mark.parametrize("command", ["train", "memory", "plan", "eval", "generate", "export x"])
def test_each_axis_of_the_mesh_has_a_flag(command):
    flags = {flag.name: flag for flag in help_of(command)[1]}
    assert {f"--mesh.{axis}" for axis in AXES} == {x for x in flags if x.startswith("--mesh.")}
    usual = {"--mesh.data": "(default: all remaining devices)"}
    for name in (f"--mesh.{axis}" for axis in AXES):
        assert flags[name].text.endswith(usual.get(name, "(default: 1)"))
    if command != "plan":
        assert "file.py:name of a hfjax.Strategy" in flags["--strategy"].text


@pytest.mark.parametrize(
    ("command", "flag", "words"),
    [
        ("train", "--kernels", KERNEL_WORDS),
        ("kernels", "--kernels", KERNEL_WORDS),
        ("kernels", "--gpu", tuple(GPUS)),
        ("memory", "--gpu", ("here", *GPUS)),
        ("train", "--dispatch", ("auto", *DISPATCH)),
        ("train", "--context.form", ("auto", *CONTEXT_FORMS)),
        ("train", "--context.order", CONTEXT_ORDERS),
        ("train", "--lr-schedule.type", ("cosine", "linear", "constant")),
    ],
)
def test_the_value_of_a_flag_is_one_of_the_table(command, flag, words):
    told = {flag.name: flag.invocation for flag in help_of(command)[1]}
    listed = re.search(r"\{(.*)\}", told[flag])
    assert listed, told[flag]
    assert sorted(listed[1].split(",")) == sorted(words)


def test_what_the_help_says_of_words_is_so():
    for decay in ("cosine", "linear", "constant"):
        hfjax.lr_schedule(1.0, steps=3, type=decay)
    assert MAX_ENTRIES == 20, "hfjax plan --top: at most 20"
    has_backward = lambda name: "B0" in str(hfjax.Schedule(name, 4).table(2)).replace("I", "B")
    assert [name for name in SCHEDULES if not has_backward(name)] == [*LEFT_OUT["schedules"]]


def test_each_word_of_kernels_is_explained_by_its_name():
    for command in ("train", "kernels"):
        texts = {flag.name: flag.text for flag in help_of(command)[1]}
        assert all(f"{word}: " in texts["--kernels"] for word in KERNEL_WORDS)


def test_a_flag_that_takes_none_says_what_it_does():
    flags = {flag.name: flag for flag in help_of("train")[1]}
    assert flags["--optimizer.max-grad-norm"].invocation == "--optimizer.max-grad-norm FLOAT|None"
    assert "None disables" in flags["--optimizer.max-grad-norm"].text
    flags = {flag.name: flag for flag in help_of("generate")[1]}
    assert flags["--top-k"].invocation == "--top-k INT|None"
    assert "None allows all" in flags["--top-k"].text


@pytest.mark.parametrize("command", COMMANDS)
def test_config_is_among_the_options_of_those_that_take_it(command):
    flags = {flag.name: flag for flag in help_of(command)[1]}
    assert ("--config" in flags) == (command in TAKE_CONFIG)
    if command in TAKE_CONFIG:
        assert flags["--config"].box == "options"


def test_two_files_of_configuration_are_refused(capfd):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["train", "--config", "a.yaml", "--config=b.yaml"])
    assert "--config" in capfd.readouterr().err


def test_a_default_of_the_configuration_is_shown(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "eval: {interval: 5}\noptimizer: {max_grad_norm: null}\ndata: {train: [a, b]}\n"
    )
    told = help_of(f"train --config {path}")[1]
    texts = {flag.name: flag.text for flag in told}
    assert texts["--eval.interval"].endswith("(default: 5)")
    assert texts["--data.train"].endswith("(default: a b)")
    assert texts["--optimizer.max-grad-norm"].endswith("(default: none)")


def test_what_few_need_stands_last():
    flags = help_of("train")[1]
    assert [flag.name for flag in flags[:4]] == ["-h", "--config", "--recipe", "--run-dir"]
    boxes = list(dict.fromkeys(flag.box.removesuffix(" options") for flag in flags))
    boxes = [box.replace("-", "_") for box in boxes]
    assert boxes == ["options", *(box for box in BOXES if box != "sampling"), "context"]
    for box in ("options", "model options", "mesh options"):
        names = [f.name.split(".")[-1].lstrip("-") for f in flags if f.box == box]
        rare = [name for name in RARE if name.replace("_", "-") in names]
        assert names[-len(rare) :] == [name.replace("_", "-") for name in rare]
    assert [flag.name for flag in flags if flag.box == "mesh options"][-2:] == [
        "--mesh.expert",
        "--mesh.row",
    ]


def test_hfjax_alone_says_what_it_is_and_where_to_begin(capsys):
    assert main([]) == 0
    told = capsys.readouterr().out
    assert told.startswith("hfjax: parallel training in JAX")
    assert "Start with `hfjax demo`, then `hfjax train`." in told
    listed = re.findall(r"^  (\w+) +(\w+) .*$", told, re.MULTILINE)
    assert [name for name, _ in listed] == list(COMMANDS)
    verbs = {"train", "evaluate", "write", "make", "show", "start", "estimate", "find"}
    assert {verb for _, verb in listed} == verbs
    assert max(map(len, told.splitlines())) <= LIMIT
