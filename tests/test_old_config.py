"""Configurations, flags and commands of before are read, or end in an error with today's name."""

import warnings
from dataclasses import fields, is_dataclass, replace
from typing import get_type_hints

import pytest

from hfjax.__main__ import main
from hfjax.cli.arguments import flags_of, parse_flags
from hfjax.trainer import load
from hfjax.trainer.config import (
    DataConfig,
    MeshConfig,
    ModelConfig,
    OffloadConfig,
    TrainConfig,
)
from hfjax.trainer.config_io import setting_changes
from hfjax.trainer.logs.trackers import group_name
from hfjax.trainer.old_config import translate
from hfjax.trainer.strategy import build_mesh, choose_strategy, load_strategy
from hfjax.trainer.tasks.images import _check_flags, is_image_task
from hfjax.utils.renamed import CONFIG_KEYS

STRATEGIES = {  # what --strategy and the mesh said -> rules and sizes of today, on eight devices
    "ddp": ("DDP", {"data": 8}),
    "zero1": ("ZERO1", {"data": 8}),
    "zero2": ("ZERO2", {"data": 8}),
    "fsdp": ("FSDP", {"fsdp": 8}),
    "zero3": ("FSDP", {"fsdp": 8}),
    "fsdp mesh.fsdp=4": ("FSDP", {"data": 2, "fsdp": 4}),
    "hsdp mesh.data=2": ("HSDP", {"data": 2, "fsdp": 4}),
    "tensor": ("DDP|TENSOR", {"tensor": 8}),
    "tensor mesh.tensor=2": ("DDP|TENSOR", {"data": 4, "tensor": 2}),
    "tensor+sequence mesh.tensor=2": ("DDP|TENSOR|SEQUENCE", {"data": 4, "tensor": 2}),
    "fsdp+tensor mesh.tensor=2": ("FSDP|TENSOR", {"fsdp": 4, "tensor": 2}),
    "ddp+grid mesh.tensor=2 mesh.row=2": ("DDP|GRID", {"data": 2, "row": 2, "tensor": 2}),
    "context": ("DDP|CONTEXT", {"context": 8}),
    "fsdp+context mesh.context=8": ("FSDP|CONTEXT", {"context": 8}),
    "fsdp+context mesh.context=8 mesh.fsdp=1": ("FSDP|CONTEXT", {"context": 8}),
    "zero2+expert mesh.expert=4": ("ZERO2|EXPERT", {"data": 2, "expert": 4}),
    "pipe mesh.pipe=4": ("DDP|PIPE", {"data": 2, "pipe": 4}),
    "fsdp+host_optimizer": ("FSDP|HOST_OPTIMIZER", {"fsdp": 8}),
    "host_parameters+host_optimizer": ("DDP|HOST_OPTIMIZER|HOST_PARAMETERS", {"data": 8}),
    "ddp mesh.data=2 mesh.fsdp=4": ("DDP", {"data": 8}),
    "tensor mesh.fsdp=2": ("DDP|TENSOR", {"data": 2, "tensor": 4}),
    "pipe mesh.fsdp=2": ("DDP|PIPE", {"data": 2, "pipe": 4}),
    "zero1 mesh.fsdp=4": ("ZERO1", {"data": 8}),
    "ddp mesh.data=2 mesh.fsdp=4 reduction=hierarchical": ("DDP", {"data": 2, "fsdp": 4}),
    "zero2 mesh.fsdp=4 reduction=hierarchical": ("ZERO2", {"data": 2, "fsdp": 4}),
}


def today(kind=TrainConfig, prefix=""):
    """Yield all fields of a configuration."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        if is_dataclass(hints[field.name]):
            yield from today(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def read(path, text):
    path.write_text(text)
    with pytest.warns(UserWarning, match=r"fields of an earlier hfjax.*\. Today: "):
        return load(path)


@pytest.mark.parametrize("old", CONFIG_KEYS)
def test_an_old_flag_is_an_error_that_names_the_new_one(old):
    flag, new = (name.replace("_", "-") for name in (old, CONFIG_KEYS[old]))
    with pytest.raises(ValueError, match=rf"^--{flag} is --{new} now\.$"):
        parse_flags(TrainConfig, [f"--{flag}", "1"], "train")


def test_the_table_names_fields_of_today():
    known = set(today())
    assert set(CONFIG_KEYS.values()) <= known
    assert not CONFIG_KEYS.keys() & known


@pytest.mark.parametrize("case", STRATEGIES)
def test_words_of_a_strategy_are_sizes_of_the_mesh(case, tmp_path):
    words, *sizes = case.split()
    lines = [f"strategy: {words}", "batch: 64"]
    lines += [size.replace("=", ": ") for size in sizes if not size.startswith("mesh.")]
    mesh = [s.removeprefix("mesh.").replace("=", ": ") for s in sizes if s.startswith("mesh.")]
    lines += [f"mesh: {{{', '.join(mesh)}}}"] if mesh else []
    config = read(tmp_path / "old.yaml", "\n".join(lines))
    name, axes = STRATEGIES[case]
    shape = build_mesh(config).shape
    assert choose_strategy(config).name == name
    assert {axis: size for axis, size in shape.items() if size > 1} == axes


def test_every_old_key_is_read(tmp_path):
    values = {
        **{"batch": 8, "accumulate": 2, "split_rows": 2, "reduction": "hierarchical"},
        **{"nonfinite": "skip", "timeout": 9, "minutes": 3, "cache": "c", "out": "o"},
        **{"offload": 0.5, "model.stored": "fp32", "model.capacity": 2, "data.scale": [0.5, 1]},
        **{"data.broken": "skip", "optimizer.decay": "linear", "optimizer.end": 0.5},
        **{"optimizer.own": "a.py:f", "model.own": "a.py:g", "optimizer.scale": ["a=1"]},
        **{"optimizer.master": True, "pipeline.name": "gpipe", "checkpoints.keep_best": True},
        **{"model.frozen_norms": True, "model.group_norms": True, "optimizer.rate": 0.25},
        **{"model.smoothing": 0.5, "checkpoints.resume": "never", "checkpoints.start": "run"},
        **{"optimizer.clip": 2, "log.sample": 3},
    }
    lines = []
    for key, new in CONFIG_KEYS.items():
        *box, last = key.split(".")
        text = f"{{{last}: {values.get(key, 7)}}}"
        lines.append(f"{box[0]}: {text}" if box else f"{last}: {values.get(key, 7)}")
        config = read(tmp_path / "old.yaml", lines[-1])
        default = TrainConfig()
        for name in new.split("."):
            config, default = getattr(config, name), getattr(default, name)
        assert config != default or key == "model.stored"


def test_old_and_new_fields_in_one_file_are_refused(tmp_path):
    path = tmp_path / "mixed.yaml"
    path.write_text("batch: 8\nrun_dir: here\n")
    with pytest.raises(ValueError, match=r"batch is now global_batch_size, and run_dir is of "):
        load(path)


def test_a_fault_in_an_old_file_is_told_with_its_line(tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text("steps: 3\noptimizer:\n  name: sgd\n  rate: fast\nbatch: 8\n")
    warnings.simplefilter("ignore")
    with pytest.raises(ValueError, match=r"old\.yaml:4: optimizer: learning_rate='fast': a numb"):
        load(path)
    path.write_text("batch: 8\nwhat: 3\n")
    with pytest.raises(ValueError, match=r"old\.yaml:2: no field 'what'"):
        load(path)


def test_an_old_python_file_is_read(tmp_path):
    text = (
        "from hfjax.run import Train\n"
        "from hfjax.run.config import Mesh, Optimizer\n"
        "config = Train(batch=16, strategy='fsdp+tensor', mesh=Mesh(tensor=2),\n"
        "               optimizer=Optimizer(rate=0.5, warmup=3))\n"
    )
    config = read(tmp_path / "old.py", text)
    assert (config.global_batch_size, config.mesh.fsdp, config.mesh.tensor) == (16, -1, 2)
    assert (config.optimizer.learning_rate, config.lr_schedule.warmup_steps) == (0.5, 3)
    assert not config.sequence_parallel


def test_what_is_of_today_is_left_alone():
    settings = {"steps": 3, "mesh": {"tensor": 2}, "offload": {"optimizer": True}}
    assert translate(settings) == (settings, {})


@pytest.mark.parametrize("name", ["fsdp", "ddp|tensor", "zero1", "host_optimizer"])
def test_words_in_strategy_name_the_flags_of_today(name):
    with pytest.raises(ValueError, match=rf"^--strategy {name.replace('|', '.')}: the mesh's si"):
        load_strategy(name)


def test_a_strategy_of_ones_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import hfjax\nmine = hfjax.FSDP.edit(name='mine', replicate_below=0)\nx = 3\n")
    config = TrainConfig(strategy=f"{path}:mine")
    assert choose_strategy(config).name == "mine"
    with pytest.raises(ValueError, match=r"has no strategy x\. There: \['mine'\]"):
        load_strategy(f"{path}:x")
    with pytest.raises(ValueError, match="--zero 1 beside --strategy"):
        TrainConfig(strategy="mine.py:mine", zero=1)


FAULTS = {  # an old file -> its error
    "batch: 16\nmesh: {fdsp: 4}": r"old\.yaml:2: mesh: no field 'fdsp'",
    "strategy: fsdp\nmesh: 4": r"old\.yaml:2: mesh: fields with values are expected, found '4'",
    "strategy: ddp\nmesh: {fsdp: two}": r"old\.yaml:2: mesh: fsdp='two': a whole number is exp",
    "strategy: zero1\nmesh: {data: 2, fsdp: 1.5}": r"old\.yaml:2: mesh: fsdp='1.5': a whole numb",
    "strategy: fsdp+tensor": r"line 1: strategy fsdp\+tensor: it splits over tensor, and mesh has",
    "strategy: ddp+pipe": "it splits over pipe, and mesh has no size of it. Give mesh: {pipe: 2}",
    "strategy: zero1+zero2": r"strategy zero1\+zero2: at most one of ddp, zero1",
    "eval: 5\nlog: {valid_every: 3}": r"line 1: log.valid_every is now eval.interval, and eval is",
    "batch: 3\nlr_schedule: null": "line 2: batch is now global_batch_size, and lr_schedule is of",
    "strategy: fsdp\noffload: {optimizer: true}": "and offload.optimizer is of today",
    "batch: 3\noptimizer.rate: 2": r"line 2: optimizer\.rate: fields are nested",
    "batch: 16\ncheckpoints: {evry: 3}": r"old\.yaml:2: checkpoint: no field 'evry'",
}


@pytest.mark.parametrize("text", FAULTS)
@pytest.mark.filterwarnings("ignore")
def test_a_fault_in_an_old_file_is_no_silent_change(text, tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=FAULTS[text]):
        load(path)


def test_old_host_flags_join_a_table_of_ones_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import hfjax\nmine = hfjax.FSDP | hfjax.TENSOR\n")
    config = TrainConfig(strategy=f"{path}:mine", offload=OffloadConfig(optimizer=True))
    assert choose_strategy(config).name == "FSDP|TENSOR|HOST_OPTIMIZER"
    with pytest.raises(ValueError, match="the table of --strategy says how sequences"):
        TrainConfig(strategy=f"{path}:mine", sequence_parallel=False)


def test_a_change_of_what_an_old_run_left_off_is_told():
    old = {"strategy": "ddp+pipe", "mesh": {"pipe": 2, "data": None}, "batch": 8}
    now = TrainConfig(global_batch_size=8, mesh=MeshConfig(fsdp=-1))
    changes = ", ".join(setting_changes(now, old))
    assert (
        changes == "--mesh.fsdp -1 (before: --mesh.fsdp 1), --mesh.pipe 1 (before: --mesh.pipe 2)"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--no-sequence-parallel --mesh.row 2 --mesh.tensor 2", "a tensor grid says how sequences"),
        ("--tensor-overlap-chunks 2", "--tensor-overlap-chunks 2: nothing uses it"),
        ("--lr 0.1 --optimizer.learning-rate 0.2", "--lr beside --optimizer.learning-rate"),
        ("--model.factory a.py:f --model.preset gpt-small", "--model.preset beside --model.fact"),
        ("--optimizer.factory a.py:f --optimizer.name sgd", "--optimizer.name beside"),
        ("--lr-schedule.type constant --lr-schedule.stable-steps 1", "type is constant"),
        ("--lr-schedule.warmup-steps -1", "--lr-schedule.warmup-steps -1: a number from 0"),
        ("--optimizer.no-master", "--optimizer.no-master is --no-master-weights now."),
        ("--zero 3", "--zero 3: parameters are sharded over --mesh.fsdp, which is 1"),
        ("--zero 1 --mesh.fsdp 4", "--zero 1 beside --mesh.fsdp 4"),
        ("--mesh.row 2", "--mesh.row 2: a tensor grid has columns too"),
        ("--mesh.fsdp -1 --mesh.tensor -1", "only one axis can take all remaining devices"),
        ("--mesh.tensor 0", "--mesh.tensor 0: a number of devices is needed"),
        ("--mesh.tensor 3", "--mesh.tensor 3: 3 devices are needed, and there are 8"),
        (
            "--pipeline.microbatches 3",
            "--pipeline.microbatches 3: nothing uses it, since --mesh.pipe is 1",
        ),
        ("--no-sequence-parallel", "--no-sequence-parallel: nothing uses it"),
    ],
)
def test_contradictions_are_refused(flags, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("hfjax.cli.train.start", lambda config: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["train", "--steps", "1", *flags.split()])
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_old_command_names_the_new_one(capsys):
    assert main(["import", "folder"]) == 2
    assert "It is hfjax inspect now." in capsys.readouterr().err


def test_a_short_flag():
    assert "lr" not in set(flags_of(TrainConfig))
    config = parse_flags(TrainConfig, ["--lr", "0.5"], "train")
    assert config.optimizer.learning_rate == 0.5


def test_metrics_have_groups():
    names = ["loss", "grad_norm", "token_loss", "valid_accuracy", "dropped_mean", "memory"]
    assert list(map(group_name, names)) == [
        *("train/loss", "train/grad_norm", "train/token_loss", "eval/accuracy"),
        *("moe/dropped_mean", "perf/memory"),
    ]


def test_the_packing_that_every_run_recorded_is_no_flag_of_text():
    data = DataConfig(packing="stream")
    model = ModelConfig(preset="resnet-tiny")
    assert is_image_task(TrainConfig(model=model, data=data))
    _check_flags(TrainConfig(model=model, data=data))
    with pytest.raises(ValueError, match=r"--data\.packing 'documents': resnet-tiny is a model of"):
        _check_flags(TrainConfig(model=model, data=replace(data, packing="documents")))
    assert replace(data, factory="own.py:data").factory == "own.py:data"
