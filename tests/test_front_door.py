"""The commands at the front door: nothing happens silently, mistakes are told in one style."""

import re
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich.console import Console

import hfjax
from hfjax.__main__ import main
from hfjax.checkpoint import restoring
from hfjax.cli.launch import split_command
from hfjax.cli.log_handler import show_log
from hfjax.distributed import init
from hfjax.distributed.init import Cluster, init_distributed
from hfjax.distributed.ports import free_port
from hfjax.trainer import RunComponents, TrainConfig, train
from hfjax.trainer.build import check_flags_used
from hfjax.trainer.config import (
    CheckpointConfig as Checkpoints,
    MeshConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    PipelineConfig as Pipeline,
)
from hfjax.trainer.config_io import save, to_plain
from hfjax.trainer.logs.console import Screen, step_line
from hfjax.trainer.logs.loss_plot import make_figure, moving_average
from hfjax.trainer.model import choose_model
from hfjax.trainer.strategy import build_mesh, choose_strategy, load_strategy
from hfjax.utils.command_errors import report_errors, run_command
from hfjax.utils.progress import show_progress
from hfjax.utils.tables import escape_controls
from tests.small_run import BIGRAMS, MODEL, NO_EVAL, STACK, corpus, small, told
from tests.workers import finished, start

pytestmark = pytest.mark.usefixtures("shown_log")

ONE = MeshConfig(data=1)
WHOLE_SEQUENCE = {"sequence_parallel": False}
ON_HOST = {"offload": OffloadConfig(optimizer=True)}
IN_NODE = {"gradient_reduction": "hierarchical"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def run(tmp_path_factory, data):
    """The configuration of a run of one step."""
    config = small(tmp_path_factory.mktemp("runs") / "one", data, steps=1, mesh=ONE)
    train(config)
    return config


# -- long silences speak --------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch):
    """What takes long is said at once."""
    at_once = partial(show_progress, first=0.0, every=0.05)
    monkeypatch.setattr("hfjax.trainer.logs.console.show_progress", at_once)


@pytest.mark.slow
def test_a_run_says_what_takes_long(data, tmp_path, impatient, capsys):
    train(small(tmp_path, data, model=BIGRAMS, steps=6, mesh=ONE))
    out, err = capsys.readouterr()
    for what in (
        "preparing the model and the data",
        "compiling what makes the parameters",
        "compiling the first step",
        "compiling the first validation",
    ):
        assert f"{what} … " in err
        assert what not in out


@pytest.mark.short("generate-compiling and writ")
@pytest.mark.parametrize(
    ("command", "doing"), [("eval", "compiling and evaluating"), ("generate", "compiling and writ")]
)
def test_what_reads_a_run_says_what_takes_long(run, command, doing, impatient, capsys, monkeypatch):
    monkeypatch.setattr("hfjax.cli.train.start", lambda config: None)
    monkeypatch.setattr(RunComponents, "written", lambda *_: time.sleep(0.1) or "text")
    assert main([command, str(run.run_dir), "--devices", "1"]) == 0
    out, err = capsys.readouterr()
    assert "reading the checkpoint … " in err
    assert doing in err
    assert doing not in out


def test_a_log_line_tells_the_time_that_is_left():
    values = {"step": 9, "loss": 2.5, "lr": 1e-3, "grad_norm": 0.25, "memory": 2**30}
    assert step_line(values, 300, 3724.4).endswith("memory 1.0 GiB  1:02:05 left")
    assert step_line(values, 300, 0.0).endswith("memory 1.0 GiB")
    assert step_line(values, 300).endswith("memory 1.0 GiB")


def test_the_bar_of_a_terminal_says_what_goes_on(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with Screen(Console(), 10) as screen:
        bar = screen._bar
        assert bar is not None
        says = lambda: bar.tasks[0].description
        with screen.busy("compiling the first step"):
            assert says() == "compiling the first step"
        assert says() == "step"


@pytest.mark.slow
def test_memory_tells_each_peak_as_soon_as_it_is_known(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("full.yaml").write_text("remat: full\n")
    Path("three.yaml").write_text("gradient_accumulation_steps: 3\n")
    monkeypatch.setattr("hfjax.cli.memory.command._configure_jax", lambda given: None)
    flags = "--gpu here --vocab 64 --model.num-layers 1 --model.hidden-size 32 --model.num-heads 2"
    assert main(["memory", *flags.split(), "--compare", "full.yaml", "three.yaml"]) == 0
    said = capsys.readouterr().err.splitlines()
    rows = [row for row in said if not row.startswith("compiling")]
    assert [row.split(": ")[0] for row in rows] == ["remat=none", "full.yaml", "three.yaml"]
    assert "peak" in rows[0]
    assert rows[2].endswith("cannot be, as told below the table")


# -- mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "status"),
    [(ValueError("no"), 2), (OSError("no"), 1), (TimeoutError("no"), 1), (ArithmeticError, None)],
)
def test_every_command_ends_in_one_style(raised, status, capsys):
    def act():
        raise raised

    if status is None:
        with pytest.raises(ArithmeticError):
            run_command("data", act)
        return
    assert run_command("data", act) == status
    assert capsys.readouterr().err == "hfjax data: no\n"
    with pytest.raises(SystemExit, match=f"^{status}$"), report_errors("train"):
        act()
    assert capsys.readouterr().err == "hfjax train: no\n"


@pytest.mark.slow
def test_a_run_starts_with_the_parameters_that_save_wrote(run, tmp_path, capsys):
    layout = RunComponents(run).layout
    hfjax.save(tmp_path / "saved", layout, hfjax.init(layout, seed=3))
    start = Checkpoints(init_from=str(tmp_path / "saved"))
    train(replace(run, run_dir=tmp_path / "new", checkpoint=start))
    assert f"starting with the parameters of {tmp_path}/saved, step 0" in capsys.readouterr().out
    train(
        replace(run, run_dir=tmp_path / "other", checkpoint=Checkpoints(init_from=str(run.run_dir)))
    )
    assert told(tmp_path / "new")[0] != told(tmp_path / "other")[0]


@pytest.mark.parametrize(
    ("name", "why"), [("empty", "it has no checkpoint"), ("no", "there is no")]
)
def test_a_start_without_checkpoints_is_refused(run, tmp_path, name, why):
    (tmp_path / "empty").mkdir()
    start = Checkpoints(init_from=str(tmp_path / name))
    with pytest.raises(
        ValueError, match=rf"--checkpoint.init-from .*/{name}: {why}.*hfjax.save wrote"
    ):
        train(replace(run, run_dir=tmp_path / "new", checkpoint=start))


def test_another_model_than_that_of_the_folder_is_told_by_its_flag(run, tmp_path):
    wide = replace(run, steps=2, model=replace(MODEL, hidden_size=64, dropout=0.5))
    told = (
        rf"--model.hidden-size 64, --model.dropout 0.5: {run.run_dir} was trained with "
        r"--model.hidden-size 32, without --model.dropout, and its checkpoint does not fit. Give "
        r"the same"
    )
    with pytest.raises(ValueError, match=rf"{told}, or begin anew: --run-dir ANOTHER\.$"):
        train(wide)
    with pytest.raises(ValueError, match=rf"{told}\.$"):
        train(replace(wide, run_dir=tmp_path, checkpoint=Checkpoints(init_from=str(run.run_dir))))


def test_another_optimizer_is_told_with_what_takes_the_parameters_along(run):
    other = replace(run, steps=2, optimizer=OptimizerConfig(name="lion"))
    anew = rf"or begin anew: --checkpoint.init-from {run.run_dir} --run-dir ANOTHER\.$"
    with pytest.raises(
        ValueError, match=rf"--optimizer.name lion: .* --optimizer.name adamw.*{anew}"
    ):
        train(other)


def test_a_saved_model_of_other_shapes_is_told_without_words_of_python(run, tmp_path):
    layout = RunComponents(replace(run, model=replace(MODEL, hidden_size=64))).layout
    hfjax.save(tmp_path / "saved", layout, hfjax.init(layout), config={"width": 64})
    start = Checkpoints(init_from=str(tmp_path / "saved"))
    with pytest.raises(ValueError, match="params/") as refused:
        train(replace(run, run_dir=tmp_path / "new", checkpoint=start))
    assert "hfjax.checkpoint_metadata" not in str(refused.value)
    assert str(refused.value).endswith("saved was trained with.")


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (
            MeshConfig(tensor=2),
            r"^--mesh.tensor 2: 2 .* there is 1\. Lower .*: --cpu-devices 2 mak",
        ),
        (MeshConfig(data=2, tensor=4), r"^--mesh.data 2 --mesh.tensor 4: 8 devices are needed"),
    ],
)
def test_more_devices_than_there_are_is_told_by_the_flags_typed(mesh, message, monkeypatch):
    here = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: here)
    with pytest.raises(ValueError, match=message):
        build_mesh(TrainConfig(mesh=mesh))


def test_sizes_that_do_not_divide_the_devices_are_told_by_their_flags():
    with pytest.raises(ValueError, match=r"--mesh.tensor 3: .* are 8\. Give .* product divides 8"):
        build_mesh(TrainConfig(mesh=MeshConfig(tensor=3)))
    with pytest.raises(ValueError, match=r"--mesh.tensor 16: .* --count 16\."):
        build_mesh(TrainConfig(mesh=MeshConfig(tensor=16)), jax.devices())


@pytest.mark.parametrize(
    ("fields", "strategy", "sizes"),
    [
        ({}, "DDP", {"data": 8}),
        ({"zero": 1}, "ZERO1", {"data": 8}),
        ({"mesh": MeshConfig(fsdp=-1)}, "FSDP", {"fsdp": 8}),
        ({"mesh": MeshConfig(data=2, fsdp=-1)}, "HSDP", {"data": 2, "fsdp": 4}),
        ({"mesh": MeshConfig(tensor=-1), **WHOLE_SEQUENCE}, "DDP|TENSOR", {"tensor": 8}),
        ({"mesh": MeshConfig(tensor=2)}, "DDP|TENSOR|SEQUENCE", {"data": 4, "tensor": 2}),
        ({"mesh": MeshConfig(pipe=-1)}, "DDP|PIPE", {"pipe": 8}),
        ({"mesh": MeshConfig(pipe=2)}, "DDP|PIPE", {"pipe": 2, "data": 4}),
        (
            {"zero": 1, "mesh": MeshConfig(tensor=2), **WHOLE_SEQUENCE},
            "ZERO1|TENSOR",
            {"data": 4, "tensor": 2},
        ),
        (
            {"mesh": MeshConfig(fsdp=2, tensor=-1)},
            "FSDP|TENSOR|SEQUENCE",
            {"fsdp": 2, "tensor": 4},
        ),
        ({"mesh": MeshConfig(fsdp=-1), **ON_HOST}, "FSDP|HOST_OPTIMIZER", {"fsdp": 8}),
        (ON_HOST, "DDP|HOST_OPTIMIZER", {"data": 8}),
        ({"mesh": MeshConfig(data=-1, fsdp=4)}, "HSDP", {"data": 2, "fsdp": 4}),
        ({"mesh": MeshConfig(fsdp=2)}, "FSDP", {"data": 4, "fsdp": 2}),
        (
            {"mesh": MeshConfig(fsdp=2, tensor=2)},
            "FSDP|TENSOR|SEQUENCE",
            {"data": 2, "fsdp": 2, "tensor": 2},
        ),
        (
            {"mesh": MeshConfig(fsdp=2, context=2)},
            "FSDP|CONTEXT",
            {"data": 2, "fsdp": 2, "context": 2},
        ),
        ({"zero": 3, "mesh": MeshConfig(context=-1)}, "FSDP|CONTEXT", {"context": 8}),
        ({"mesh": MeshConfig(fsdp=2, pipe=2)}, "FSDP|PIPE", {"data": 2, "fsdp": 2, "pipe": 2}),
        (
            {"mesh": MeshConfig(fsdp=2, expert=2)},
            "FSDP|EXPERT",
            {"data": 2, "fsdp": 2, "expert": 2},
        ),
        (
            {"mesh": MeshConfig(fsdp=-1, row=2, tensor=2)},
            "FSDP|GRID",
            {"fsdp": 2, "row": 2, "tensor": 2},
        ),
        ({"mesh": MeshConfig(row=2, tensor=2)}, "DDP|GRID", {"data": 2, "row": 2, "tensor": 2}),
        ({"zero": 1, "mesh": MeshConfig(fsdp=2), **IN_NODE}, "ZERO1", {"data": 4, "fsdp": 2}),
        ({"zero": 0, "mesh": MeshConfig(fsdp=2), **IN_NODE}, "DDP", {"data": 4, "fsdp": 2}),
    ],
)
def test_sizes_of_the_mesh_say_what_is_on_and_others_take_the_remaining_devices(
    fields, strategy, sizes
):
    config = TrainConfig(**fields)
    assert choose_strategy(config).name == strategy
    found = build_mesh(config).shape
    assert {axis: size for axis, size in found.items() if size > 1} == sizes


@pytest.mark.parametrize(
    ("mesh", "told"),
    [
        (MeshConfig(data=1), r"^--mesh.data 1: 1 of the 8 devices is used, and 7 would"),
        (MeshConfig(data=2, fsdp=2), r"^--mesh.data 2 --mesh.fsdp 2: 4 of the 8 devices are"),
        (MeshConfig(data=2, tensor=2), r"4 would .* out --mesh.data, which then is 4, or"),
        (MeshConfig(data=2), r"6 would stay idle\. .* is 8, or say .* are meant: --devices 2\."),
        (MeshConfig(data=1, tensor=3), r"5 would stay idle\. Give sizes whose product is 8, or"),
    ],
)
def test_devices_that_would_stay_idle_are_refused_by_the_flags(mesh, told):
    with pytest.raises(ValueError, match=told):
        build_mesh(TrainConfig(mesh=mesh))
    with pytest.raises(ValueError, match=told.replace("--devices", "--count")):
        build_mesh(TrainConfig(mesh=mesh), jax.devices())


def test_a_run_takes_the_first_devices_where_that_is_said(monkeypatch):
    found = build_mesh(TrainConfig(devices=2))
    assert list(found.devices.flat) == jax.devices()[:2]
    with pytest.raises(ValueError, match=r"^--devices 9: there are 8\. Give a number from 1 to 8"):
        build_mesh(TrainConfig(devices=9))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"^--devices 2: .* of 2 processes.* all of its devices"):
        build_mesh(TrainConfig(devices=2))
    with pytest.raises(ValueError, match=r"would stay idle\. Leave out --mesh.data, .* is 8\.$"):
        build_mesh(TrainConfig(mesh=MeshConfig(data=2)))


def test_two_axes_that_take_the_remaining_devices_are_refused():
    told = r"^--mesh.fsdp -1 and --mesh.tensor -1: only one .* Give a number for the other\."
    with pytest.raises(ValueError, match=told):
        build_mesh(TrainConfig(mesh=MeshConfig(fsdp=-1, tensor=-1)))


def test_python_that_fails_in_a_configuration_is_a_mistake_with_its_line(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("run.py").write_text("x = 1\nconfig = nowhere\n")
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["train", "--config", "run.py"])
    told = capsys.readouterr().err
    assert told.startswith("hfjax train: --config ")
    assert "name 'nowhere' is not defined (NameError in line 2)" in told
    with pytest.raises(ValueError, match=r"--model.factory .*: .*NameError in line 2"):
        choose_model(TrainConfig(model=ModelConfig(factory=f"{tmp_path}/run.py:make")), 256)


@pytest.mark.parametrize(
    ("words", "own", "command"),
    [
        ("-n 2 prog -x -- y", "-n 2", "prog -x -- y"),
        ("-n=2 --grace 3 -- prog", "-n=2 --grace 3", "prog"),
        ("--help", "--help", ""),
        ("-n -- prog", "-n", "prog"),
        ("prog", "", "prog"),
        ("-n 2", "-n 2", ""),
    ],
)
def test_the_command_to_launch_needs_no_dashes_before_it(words, own, command):
    assert split_command(words.split()) == (own.split(), tuple(command.split()))


def test_a_launcher_without_a_command_says_what_to_type(capfd):
    assert main(["launch", "-n", "2"]) == 2
    assert "hfjax launch: no command. Put it after" in capfd.readouterr().err
    assert main(["launch", "-n", "1", "sh", "-c", "exit 7"]) == 7


def test_a_mistake_in_a_configuration_is_not_tried_again(tmp_path, capfd):
    (tmp_path / "run.py").write_text("config = nowhere\n")
    train = [sys.executable, "-m", "hfjax", "train", "--config", str(tmp_path / "run.py")]
    assert main(["launch", "-n", "1", "--max-restarts", "3", "--", *train]) == 2
    told = capfd.readouterr().err
    assert "NameError in line 1" in told
    assert "restart 1" not in told


def test_control_characters_of_a_model_are_shown_on_a_terminal_and_kept_elsewhere(
    monkeypatch, capsys
):
    text = "a\x1b[2J\x07\tb\r\n\x9bé\u00a0�"
    assert escape_controls(text) == "a\\x1b[2J\\x07\tb\\r\n\\x9bé\u00a0�"
    Screen(None, 1).say("a\x1bb")
    assert "a\x1bb" in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    with show_log():
        Screen(None, 1).say("a\x1bb")
    assert "a\\x1bb" in capsys.readouterr().out


def test_generate_writes_after_each_prompt_and_counts_the_seed_on(run, monkeypatch, capsys):
    monkeypatch.setattr("hfjax.cli.train.start", lambda config: None)
    told = lambda parts, state, prompt, count, sampling: f"{prompt} {count} {sampling.seed}"
    monkeypatch.setattr(RunComponents, "written", told)
    words = [
        "generate",
        str(run.run_dir),
        "--devices",
        "1",
        "--tokens",
        "3",
        "--seed",
        "4294967295",
    ]
    assert main([*words, "--prompt", "one", "--prompt=two"]) == 0
    assert capsys.readouterr().out == "one 3 4294967295\n\ntwo 3 0\n"
    assert main(words) == 0
    assert capsys.readouterr().out == "\n 3 4294967295\n"


@pytest.mark.parametrize(
    ("command", "flag"),
    [("train", "--data.train"), ("train", "--optimizer.no-decay"), ("memory", "--compare")],
)
def test_a_flag_of_several_values_that_is_there_twice_is_refused(command, flag, capsys):
    wanted = f"hfjax {command}: {flag} is there twice, and only its last values would count. Give"
    for words in ([flag, "a", flag, "b"], [f"{flag}=a", f"{flag.replace('no-', 'no_')}=b"]):
        status = None
        try:
            status = main([command, *words])
        except SystemExit as end:
            status = end.code
        assert status == 2
        assert capsys.readouterr().err.startswith(wanted)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--context.ulysses", "2"], "--context.ulysses 2: .* since --mesh.context is 1"),
        (["--context.form=ring"], "--context.form 'ring': .* Give --mesh.context 2, or"),
        (["--context.order", "zigzag"], "--context.order 'zigzag': nothing uses it"),
        (["--pipeline.microbatches", "4"], "since --mesh.pipe is 1. Give --mesh.pipe 2, or"),
        (
            ["--pipeline.schedule=gpipe", "--mesh.fsdp", "-1"],
            "'gpipe': .* --mesh.pipe is 1",
        ),
        (["--pipeline.chunks", "2", "--pipeline.schedule", "interleaved"], "or leave the flag out"),
        (["--no-sequence-parallel"], "--no-sequence-parallel: nothing .* Give --mesh.tensor 2, or"),
    ],
)
@pytest.mark.parametrize("command", ["train", "memory"])
def test_a_flag_without_effect_is_refused_by_its_name(command, words, told, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([command, *words])
    assert re.search(told, capsys.readouterr().err)


def test_a_flag_at_its_default_and_one_that_a_configuration_uses_pass():
    piped = [TrainConfig(mesh=MeshConfig(pipe=-1)), TrainConfig(mesh=MeshConfig(pipe=2))]
    piped += [TrainConfig(pipeline=Pipeline("gpipe"))]
    check_flags_used(piped[-1:], ["--steps", "3"])  # said in a file, of a pipeline that is off here
    check_flags_used([TrainConfig()], ["--pipeline.schedule", "1f1b", "--context.order", "auto"])
    for config in piped[:2]:
        given = replace(config, pipeline=Pipeline(microbatches=4))
        configs = [TrainConfig(pipeline=given.pipeline), given]
        check_flags_used(configs, ["--pipeline.microbatches=4"])


@pytest.mark.parametrize(
    ("gpus", "more", "warns"),
    [
        (["0", "1"], [], True),
        ([], [], False),
        (["0"], ["--cpu-devices", "None"], False),
        (["0"], ["--cpu-devices", "4"], False),
    ],
)
def test_a_file_that_asks_for_simulated_devices_where_gpus_are_is_a_warning(
    tmp_path, monkeypatch, capsys, gpus, more, warns
):
    """As runs of early versions saved it: the file of such a run is in tests/before."""
    given = []
    monkeypatch.setattr("hfjax.cli.train.start", given.append)
    monkeypatch.setattr("hfjax.cli.train.visible_gpus", lambda: gpus)
    monkeypatch.setattr("hfjax.cli.train.train", lambda *_: SimpleNamespace(reason=None))
    (tmp_path / "config.yaml").write_text("steps: 1\ncpu_devices: 8\n")
    assert main(["train", "--config", str(tmp_path / "config.yaml"), *more]) == 0
    err = capsys.readouterr().err
    told = "config says cpu_devices: 8. This run computes on simulated CPU devices, and not on the "
    assert (told in err) == warns
    assert ("2 GPUs of this machine. To use the GPUs, give --cpu-devices None." in err) == warns
    assert given[0].cpu_devices == {"None": None, "4": 4}.get("".join(more[1:]), 8)


@pytest.mark.slow
def test_any_number_of_rows_is_evaluated_each_row_once(run, monkeypatch, capsys):
    monkeypatch.setattr("hfjax.cli.train.start", lambda config: None)
    told = set()
    for batch in ("5", "8", "16"):
        assert main(["eval", str(run.run_dir), "--batch-size", batch]) == 0
        told.add(capsys.readouterr().out)
    assert len(told) == 1


@pytest.fixture
def made(monkeypatch):
    """The parts of runs that commands read, as they are made."""
    monkeypatch.setattr("hfjax.cli.train.start", lambda config: None)
    found = []
    restore = lambda place, layout, *given, **fields: (
        found.append((layout, hfjax.checkpoint.restore(place, layout, *given, **fields).state))
        or hfjax.checkpoint.restore(place, layout, *given, **fields)
    )
    monkeypatch.setattr("hfjax.cli.train.hfjax.restore", restore)
    return found


@pytest.mark.parametrize("command", ["eval", "generate"])
@pytest.mark.short("eval")
def test_what_reads_a_run_lays_it_out_as_the_run_was_if_that_fits(
    data, tmp_path, made, command, capsys
):
    fields = {"steps": 1, "eval": NO_EVAL, "model": STACK, "master_weights": True}
    spread = {"mesh": MeshConfig(fsdp=2, tensor=2, data=2), **ON_HOST, **WHOLE_SEQUENCE}
    config = small(tmp_path / "run", data, **fields, **spread)
    train(config)
    capsys.readouterr()
    words, told = [command, str(config.run_dir), "--trust"], set()
    words += ["--tokens", "4", "--temperature", "0"] if command == "generate" else []
    both = MeshConfig(data=2, tensor=2, context=2)  # of which none comes first on two devices
    why = f"parameters are replicated, since the run's mesh does not fit: {both.flags}: 8 devices"
    for more, on in (
        ([], {"data": 2, "fsdp": 2, "tensor": 2}),
        (["--devices", "2"], {"fsdp": 2}),
        (["--devices", "1"], {}),
        (["--mesh.fsdp", "-1"], {"fsdp": 8}),
        (["--mesh.fsdp", "2", "--mesh.tensor", "4"], {"fsdp": 2, "tensor": 4}),
        (["--strategy", "hfjax:ZERO1"], {"data": 8}),
        (["--devices=2"], {"data": 2}),
    ):
        if is_last := more == ["--devices=2"]:
            save(replace(config, mesh=both, devices=None), config.directory / "config.yaml")
        assert main([*words, *more]) == 0
        layout, state = made[-1]
        assert {axis: n for axis, n in layout.mesh.shape.items() if n > 1} == on
        assert not jax.tree.leaves(state.optimizer)  # no moments, no master weights
        assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.bfloat16.dtype}
        out, err = capsys.readouterr()
        told.add(out[:24])
        assert (why in err) == is_last, err
        assert ("replicated" in err) == is_last, err
    assert len(told) == 1


@pytest.mark.slow
def test_what_evaluates_a_run_divides_parameters_as_the_run_and_reads_nothing_else(
    data, tmp_path, made, monkeypatch
):
    wide = ModelConfig(preset="gpt-tiny", seq_len=16, num_layers=1, num_heads=2, hidden_size=64)
    fields = {"steps": 1, "eval": NO_EVAL, "model": wide, "mesh": MeshConfig(fsdp=-1)}
    config = small(tmp_path / "run", data, **fields)
    train(config)
    read = []
    load = restoring._load_arrays
    spy = lambda path, wanted, where: read.extend(wanted) or load(path, wanted, where)
    monkeypatch.setattr(restoring, "_load_arrays", spy)
    assert main(["eval", str(config.run_dir), "--max-batches", "1"]) == 0
    assert {path.partition("/")[0] for path in read} == {"params"}  # of a GPT without dropout
    params = jax.tree.leaves(made[-1][1].params)
    assert not jax.tree.leaves(made[-1][1].optimizer)
    large = [x for x in params if x.size >= 16384]  # smaller ones are whole under FSDP
    assert len(large) == 3
    for x in large:
        assert {shard.data.nbytes for shard in x.addressable_shards} == {x.nbytes // 8}
    here = sum(x.addressable_shards[0].data.nbytes for x in params)
    assert here < 0.4 * sum(x.nbytes for x in params)


def test_generate_shows_control_characters_on_a_terminal(run, monkeypatch, capsys):
    monkeypatch.setattr("hfjax.cli.train.start", lambda config: None)
    monkeypatch.setattr(RunComponents, "written", lambda *_: "a\x1bb")
    words = ["generate", str(run.run_dir), "--devices", "1"]
    assert main(words) == 0
    assert capsys.readouterr().out == "a\x1bb\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(words) == 0
    assert capsys.readouterr().out == "a\\x1bb\n"


# -- processes ------------------------------------------------------------------------------


JOINED = """
import jax, sys
process, port = map(int, sys.argv[1:])
jax.distributed.initialize(f"localhost:{port}", 2, process)
import hfjax
found = hfjax.init_distributed(processes=2, process=process)
print(found.process, found.processes, jax.device_count(), found.source)
try:
    hfjax.init_distributed(processes=3)
except ValueError as wrong:
    print(wrong)
"""


@pytest.mark.slow
def test_a_run_that_the_program_joined_itself_is_taken_and_its_numbers_checked():
    port = free_port()
    ends = finished(*(start(JOINED, process, port) for process in (0, 1)))
    for process, (status, out, err) in enumerate(ends):
        assert status == 0, err
        assert f"{process} 2 2 jax.distributed.initialize" in out
        assert "init_distributed(processes=3): this process has joined a run already" in out
        assert f"as process {process} of 2 (jax.distributed.initialize)" in out


def test_joining_again_under_another_number_is_refused(monkeypatch):
    monkeypatch.setattr(init, "_cluster", Cluster(0, 1, None, "one process"))
    assert init_distributed(processes=1, process=0).processes == 1
    with pytest.raises(ValueError, match=r"process=1\): .* as process 0 of 1 \(one process\)"):
        init_distributed(process=1)


# -- the picture of a run -------------------------------------------------------------------


def journal(steps, valid_every):
    """Return the lines of a metrics file: a loss that falls, with noise."""
    noise = np.random.default_rng(0).normal(0, 0.25, steps)
    for step in range(steps):
        loss = 5.5 * np.exp(-8 * step / steps) + 2
        yield {"step": step, "loss": loss + noise[step], "lr": 3e-3 * (1 - step / steps)}
        if step % valid_every == 0:
            yield {"step": step, "valid_loss": loss + 0.1}


FOLDER = "/a/long/path/to/a/folder/of/models"
LONG = {
    "model": ModelConfig(factory=f"{FOLDER}/that_are_mine.py:make_it", seq_len=4096),
    "mesh": MeshConfig(data=16, fsdp=8, tensor=8, context=4, expert=2, pipe=4),
    "strategy": f"{FOLDER}/rules_that_are_mine.py:fsdp_tensor_sequence",
}


@pytest.mark.parametrize(
    ("steps", "name", "config"),
    [
        (1, "one", TrainConfig()),
        (20, "runs", TrainConfig(steps=20)),
        (20_000, "a" * 99, TrainConfig(**LONG)),
    ],
)
def test_nothing_in_the_picture_of_a_run_is_cut_off_or_overlaps(steps, name, config):
    drawn = make_figure(list(journal(steps, 5)), name, to_plain(config))
    drawn.draw(renderer := FigureCanvasAgg(drawn).get_renderer())
    axes, *beside = drawn.axes
    texts = {"name": axes.texts[0], "settings": axes._left_title, "legend": drawn.legends[0]}
    places = {what: text.get_window_extent(renderer) for what, text in texts.items()}
    axis = {"steps": axes.xaxis, "loss": axes.yaxis}
    axis |= dict.fromkeys(["rate"] * len(beside), drawn.axes[-1].yaxis)
    places |= {what: one.get_tightbbox(renderer) for what, one in axis.items()}
    for what, place in places.items():
        assert 0 <= place.x0 < place.x1 <= drawn.bbox.x1, what
        assert 0 <= place.y0 < place.y1 <= drawn.bbox.y1, what
    around = [what for what in places if what not in ("loss", "rate")]  # axes meet in corners
    for one, other in combinations(around, 2):
        assert not places[one].overlaps(places[other]), (one, other)
    scale = axes.yaxis.get_offset_text().get_window_extent(renderer)
    for one in (*(other.yaxis.get_offset_text() for other in beside),):
        assert not one.get_window_extent(renderer).overlaps(places["settings"])
        assert not one.get_window_extent(renderer).overlaps(places["name"])
    assert scale.width < 1


def test_the_picture_of_a_run_has_mean_validations_rate_and_settings():
    drawn = make_figure(list(journal(200, 50)), "runs", to_plain(TrainConfig(steps=200)))
    axes, beside = drawn.axes
    raw, mean_of_it, valid = axes.lines
    assert raw.get_alpha() < 0.5 < 1 < mean_of_it.get_linewidth()
    assert np.diff(raw.get_ydata()).std() > 4 * np.diff(mean_of_it.get_ydata()).std()
    assert valid.get_xdata().tolist() == [0, 50, 100, 150]
    assert beside.lines[0].get_ydata().max() == pytest.approx(3e-3)
    assert beside.get_ylabel() == "learning rate"
    assert axes.get_title("left").startswith("gpt-tiny, mesh data=-1, global batch size 32, opt")


def test_a_mean_is_of_those_around_and_of_nothing_else():
    values = np.random.default_rng(0).normal(size=9)
    found = moving_average(values, 5)
    assert found[4] == pytest.approx(values[2:7].mean())
    assert found[0] == pytest.approx(values[:3].mean())
    assert found[8] == pytest.approx(values[6:].mean())
    assert moving_average(values[:1], 5) == pytest.approx(values[:1])


def test_the_name_of_a_strategy_reaches_a_terminal_as_text():
    for name in ("ddp\u202e", "\x1b[31mddp", "hfjax:DDP\u202e"):
        with pytest.raises(ValueError, match=r"strategy") as told:
            load_strategy(name)
        assert str(told.value).isprintable()
