"""Runs in real processes: as many as you like, killed, stopped, started again; the same losses."""

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hfjax
from hfjax.__main__ import main
from hfjax.cli.train import start
from hfjax.parallel.mesh import AXES
from hfjax.trainer import config_io, train
from hfjax.trainer.config import (
    CheckpointConfig,
    LogConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from hfjax.trainer.train_loop import LAG
from tests import hanging_train
from tests.hanging_train import HANGS, SLOW
from tests.small_run import BIGRAMS, NO_EVAL, corpus, small, told

pytestmark = pytest.mark.usefixtures("shown_log")

STEPS, LONG = 6, 150
QUIET = LogConfig(interval=50, sample_tokens=0)
ROOT = Path(__file__).parents[1]
HERE = {"PYTHONPATH": str(ROOT)}
HFJAX = [sys.executable, "-W", "ignore", "-m", "hfjax"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A directory with a data set; programs compiled by one test serve the others."""
    directory = tmp_path_factory.mktemp("shared")
    return directory, corpus(directory)


def written(shared, name, **changes):
    """Return the file of a configuration, and the directory of its run."""
    directory, data = shared
    fields = {"mesh": MeshConfig(fsdp=-1), "eval": NO_EVAL, "log": QUIET}
    fields |= {"compilation_cache": directory / "programs", "watchdog_timeout": 120.0}
    config = small(directory / name, data, **(fields | changes))
    config_io.save(config, directory / f"{name}.yaml")
    return directory / f"{name}.yaml", directory / name


def started(*words, **more):
    path = f"{os.getcwd()}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.Popen(
        [*HFJAX, *map(str, words)],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"} | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process, code=0, timeout=240):
    out, _ = process.communicate(timeout=timeout)
    assert process.returncode == code, out
    return out


def launched(file, processes, devices, *words, **more):
    own = ["launch", "-n", processes, "--devices-per-process", devices, *words]
    return started(*own, "--", *HFJAX, "train", "--config", file, **more)


def reached(process, directory, steps):
    """Wait until a run has done so many steps."""
    metrics, deadline = directory / "metrics.jsonl", time.monotonic() + 120
    while not metrics.is_file() or metrics.read_text().count("\n") < steps:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def workers(process):
    """Return the processes that a launcher has started and that train."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1]) if words else 0
        except OSError:
            continue
        if parent == process.pid and b"train" in words:
            found.append(int(entry.name))
    return sorted(found)


def losses_of(shared, processes):
    mesh = MeshConfig(data=2, fsdp=2)
    file, directory = written(shared, f"of{processes}", steps=STEPS, mesh=mesh)
    ended(launched(file, processes, 4 // processes))
    return list(told(directory).values())


@pytest.fixture(scope="module")
def losses_of_one(shared):
    return losses_of(shared, 1)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_have_the_losses_of_one(shared, losses_of_one, processes):
    np.testing.assert_allclose(losses_of(shared, processes), losses_of_one, rtol=1e-6)


@pytest.mark.slow
def test_tensor_across_processes_trains_resumes_evaluates_and_writes_as_in_one(shared):
    """Four processes with a device each, two with two; what they saved goes on in one."""
    fields = {"mesh": MeshConfig(fsdp=2, tensor=2), "sequence_parallel": False}
    fields["checkpoint"] = CheckpointConfig(0)
    found, directory = {}, None
    for processes in (1, 2, 4):
        file, directory = written(shared, f"width{processes}", steps=STEPS, **fields)
        ended(launched(file, processes, 4 // processes, "--max-restarts", "3"))
        found[processes] = list(told(directory).values())
        np.testing.assert_allclose(found[processes], found[1], rtol=1e-6)
    assert directory is not None
    more = ["--cpu-devices", "4", "--steps", STEPS + 2]
    for name in ("width1", "width4"):
        ended(started("train", "--config", shared[0] / f"{name}.yaml", *more))
    ones, fours = (list(told(shared[0] / name).values()) for name in ("width1", "width4"))
    assert len(fours) == STEPS + 2
    np.testing.assert_allclose(fours, ones, rtol=1e-6)

    four = ["launch", "-n", 4, "--devices-per-process", 1, "--", *HFJAX]
    tensor = ["--mesh.fsdp", "-1", "--mesh.tensor", "2"]
    tensor += ["--compilation-cache", shared[0] / "programs"]
    validated = lambda out: re.findall(r"validated after step \d+: loss ([\d.]+)", out)
    several = validated(ended(started(*four, "eval", directory, *tensor)))
    assert several == validated(ended(started("eval", directory, "--cpu-devices", "1"))) != []
    write = ["generate", directory, "--prompt", "mesh", "--tokens", "8", "--temperature", "0"]
    alone = ended(started(*write, "--cpu-devices", "1")).splitlines()[-1]
    assert ended(started(*four, *write, *tensor)).splitlines()[-1] == f"[0] {alone}"


@pytest.mark.slow
def test_the_lines_of_the_readme_work_one_after_the_other_in_processes_of_one_device(
    tmp_path, monkeypatch
):
    """As printed, but for a small model in float32."""
    monkeypatch.chdir(tmp_path)
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    line = lambda start, word: next(
        shlex.split(text, comments=True)[1:]
        for text in lines
        if text.startswith(f"hfjax {start}") and word in text
    )
    first, second = (
        line("train", "--run-dir runs/fsdp"),
        line("launch -n 2", "runs/fsdp/config.yaml"),
    )
    first[first.index("bf16")] = "fp32"  # to compare the losses
    model = ["--model.seq-len", 16, "--model.num-layers", 1, "--model.num-heads", 2]
    model += ["--model.hidden-size", 32]
    ended(started(*first, *model, "--steps", 3, "--log.sample-tokens", 0, **HERE))
    assert config_io.load("runs/fsdp/config.yaml").cpu_devices is None  # it is of that start
    at = second.index("--") + 1
    assert second[at] == "hfjax"
    out = ended(started(*second[:at], *HFJAX, *second[at + 1 :], **HERE))
    assert "FSDP on fsdp=2 (cpu)" in out
    ones, twos = (list(told(Path("runs") / name).values()) for name in ("fsdp", "two"))
    np.testing.assert_allclose(twos, ones, rtol=1e-6)


@pytest.mark.slow
def test_a_job_that_hangs_is_started_again_told_to_stop_and_ended_by_one_process(shared, tmp_path):
    """It loses no step, compiles no step again, and has the losses of one process all along.

    What hangs is ended by the watchdog of its peer, and killed.
    """
    changes = {"model": BIGRAMS, "steps": LONG, "watchdog_timeout": 6.0}
    changes["compilation_cache"] = None
    file, directory = written(shared, "job", checkpoint=CheckpointConfig(interval=30), **changes)
    config = replace(
        config_io.load(file), mesh=MeshConfig(fsdp=2), devices=2, log=replace(QUIET, interval=0)
    )
    result = train(replace(config, run_dir=tmp_path, checkpoint=CheckpointConfig(interval=0)))
    assert result.state.params["table"].addressable_data(0).shape == (128, 256)  # split in two
    alone = told(tmp_path)

    kept = {"JAX_COMPILATION_CACHE_DIR": str(shared[0] / "kept")}
    kept["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    programs = lambda: sorted((shared[0] / "kept").glob("*step*"))
    own = ["launch", "-n", 2, "--devices-per-process", 1, "--grace", "1", "--max-restarts", "1"]
    command = [sys.executable, "-W", "ignore", hanging_train.__file__, "--config", file]
    job = started(*own, "--", *command, **kept)
    reached(job, directory, HANGS - LAG)
    before, compiled = told(directory), programs()
    assert (saved := hfjax.latest_step(directory / "checkpoints"))
    reached(job, directory, SLOW + LAG)  # started again
    job.terminate()
    out = ended(job, 143)
    step = stopped_after(directory)
    assert "no progress for 6 s, while doing: step" in out
    assert "process 0 failed with exit code 124; ending process 1" in out
    assert "not ended 1 s after the failure: killing process 1" in out
    (again,) = map(int, re.findall(r"going on after step (\d+)", out))
    assert saved <= again < len(before) <= HANGS
    assert f"stopped after step {step} (SIGTERM)" in out
    assert SLOW < step < LONG
    assert compiled == programs() != []
    found = told(directory)
    assert list(found) == list(range(step))
    assert before == {i: found[i] for i in before}  # to the bit, also where they were done twice
    several = [list(losses.values())[:STEPS] for losses in (found, alone)]
    np.testing.assert_allclose(*several, rtol=1e-6)

    assert train(config).step == LONG
    found = told(directory)
    assert found.keys() == alone.keys()
    np.testing.assert_allclose(list(found.values()), list(alone.values()), rtol=1e-3)


@pytest.fixture(scope="module")
def undisturbed(shared):
    """What two processes that nobody disturbs tell."""
    changes = {"steps": LONG, "checkpoint": CheckpointConfig(interval=70)}
    file, directory = written(shared, "undisturbed", **changes)
    ended(launched(file, 2, 1))
    return told(directory)


@pytest.mark.slow
def test_killed_told_to_stop_and_interrupted_a_job_goes_on_with_the_same_losses(
    shared, undisturbed
):
    """One run: a process is killed, the job told to stop, then Ctrl-C; one process ends it."""
    changes = {"steps": LONG, "checkpoint": CheckpointConfig(interval=70)}
    file, directory = written(shared, "disturbed", **changes)
    job = launched(file, 2, 1, "--max-restarts", "1")
    reached(job, directory, 90)
    os.kill(workers(job)[1], signal.SIGKILL)
    reached(job, directory, 110)  # started again
    job.terminate()
    out = ended(job, 143)
    step = stopped_after(directory)
    assert "going on after step" in out
    assert f"stopped after step {step} (SIGTERM)" in out
    assert 110 <= step < LONG
    assert told(directory) == {i: undisturbed[i] for i in range(step)}

    programs = set((shared[0] / "programs").iterdir())
    job = launched(file, 2, 1)
    reached(job, directory, step + 5)
    job.send_signal(signal.SIGINT)
    assert f"going on after step {step}" in ended(job, 130)
    assert set((shared[0] / "programs").iterdir()) == programs  # nothing was compiled again
    step = stopped_after(directory)
    assert step < LONG
    assert told(directory) == {i: undisturbed[i] for i in range(step)}

    ended(started("train", "--config", file, "--cpu-devices", "2"))
    found = told(directory)
    assert found.keys() == undisturbed.keys()
    np.testing.assert_allclose(list(found.values()), list(undisturbed.values()), rtol=1e-3)


def stopped_after(directory):
    """Return the step of the last checkpoint."""
    step = hfjax.latest_step(directory / "checkpoints")
    assert step is not None
    return step


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_job_whose_terminal_is_closed_saves(shared, processes):
    file, directory = written(shared, f"terminal{processes}", steps=5000, model=BIGRAMS)
    own = ["launch", "-n", processes, "--devices-per-process", 1, "--", *HFJAX]
    words = map(str, [*HFJAX, *own, "train", "--config", file])
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe(sys.executable, [*words], os.environ | HERE | {"JAX_PLATFORMS": "cpu"})
    said = b""
    while b"step   50/5000" not in said:
        said += os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 143
    assert 50 <= stopped_after(directory) < 5000


def test_processes_with_other_settings_are_told_apart(shared):
    file, _ = written(shared, "differs")
    train = " ".join(map(shlex.quote, [*HFJAX, "train", "--config", str(file)]))
    words = ["sh", "-c", f"exec {train} --seed $HFJAX_PROCESS"]
    out = ended(started("launch", "-n", 2, "--devices-per-process", 1, "--", *words), 2)
    assert (
        "hfjax train: the configuration of process 1 differs from that of process 0: seed 0, "
        in out
    )
    assert "seed 0, there 1. Give all processes the same" in out


def test_a_peer_that_does_not_come_is_not_waited_for_as_long_as_a_step(monkeypatch):
    asked = {}
    monkeypatch.setattr("hfjax.cli.train.enable_program_cache", lambda place: None)
    monkeypatch.setattr("hfjax.cli.train.init_distributed", lambda **given: asked.update(given))
    start(TrainConfig(watchdog_timeout=600.0))
    assert asked == {"timeout": 60.0}
    start(TrainConfig(init_timeout=5.0))
    assert asked == {"timeout": 5.0}


@pytest.mark.slow
def test_thirty_kills_lose_nothing(shared):
    """The run is killed at random moments, 30 times, also while it starts and saves."""
    changes = {"steps": 600, "checkpoint": CheckpointConfig(interval=3), "cpu_devices": 2}
    file, whole = written(shared, "alone", **changes)
    ended(started("train", "--config", file))
    file, directory = written(shared, "thirty", **changes)
    rng, latest = np.random.default_rng(0), 0
    for _ in range(30):
        job = started("train", "--config", file)
        begun = time.monotonic()
        wanted = rng.uniform(3.0, 8.0)
        while job.poll() is None and time.monotonic() - begun < wanted:
            time.sleep(0.01)
        job.kill()
        job.communicate()
        found = hfjax.latest_step(directory / "checkpoints") or 0
        assert found >= latest
        latest = found
    ended(started("train", "--config", file))
    assert told(directory) == told(whole)


def test_the_commands_train_evaluate_and_write(shared, monkeypatch, capsys):
    """In a process of its own: a text on another number of devices."""
    monkeypatch.setattr("hfjax.cli.train.enable_program_cache", lambda place: None)

    def here(*words):
        assert main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    changes = {"model": BIGRAMS, "mesh": MeshConfig(), "optimizer": OptimizerConfig(ema=0.5)}
    file, directory = written(shared, "commands", **changes)
    one = ["--devices", "1"]
    assert "done: 12 steps" in here("train", "--config", file, "--log.sample-tokens", "8", *one)
    saved = [directory, "--trust", "--compilation-cache", shared[0] / "programs"]
    out = here("eval", *saved, "--batch-size", "24")
    assert "validated after step 12: loss" in out
    latest = here("eval", *saved, "--no-average", "--mesh.fsdp", "-1")
    assert latest != out
    write = ["generate", *saved, "--prompt", "mesh", "--tokens", "12", "--temperature", "0"]
    text = here(*write)
    assert text.startswith("mesh")
    again = ended(started(*write, "--cpu-devices", "2", "--mesh.fsdp", "-1"))
    assert again.endswith(text)  # what takes long says so before


@pytest.mark.parametrize("command", ["eval", "generate"])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": ModelConfig(factory="stranger.py:make")}, "--model.factory "),
        ({"model": ModelConfig(loss="stranger.py:make")}, "--model.loss "),
        (
            {"optimizer": OptimizerConfig(factory="stranger.py:make", ema=0.5)},
            "--optimizer.factory ",
        ),
    ],
)
def test_code_that_a_run_names_is_run_only_on_trust(
    command, fields, named, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hfjax.cli.train.start", lambda config: None)
    Path("stranger.py").write_text("raise SystemExit('it ran')")
    Path("run").mkdir()
    config_io.save(TrainConfig(cpu_devices=1, **fields), Path("run/config.yaml"))
    with pytest.raises(SystemExit, match="2"):
        main([command, "run"])
    told = capfd.readouterr().err
    assert f"run/config.yaml names Python code, {named}{tmp_path}/stranger.py:make, " in told
    assert "give --trust" in told
    with pytest.raises(SystemExit, match="it ran"):
        main([command, "run", "--trust"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--config", "nowhere.yaml"], "--config nowhere.yaml: there is no such file"),
        (["train", "--config", "run.yaml"], "run.yaml:1: steps='none': a whole number is expected"),
        (["memory", "--config=run.yaml"], "run.yaml:1: steps='none': a whole number is expected"),
        (["train", "--config", "run.py"], "--config run.py: it must define `config`"),
        (["train", "--config"], "--config: the name of a file is expected"),
        (["train", "--run-dir="], "--run-dir: its value is empty"),
        (["data", "--data-dir="], "--data-dir: its value is empty"),
        (["train", "--steps", "0"], "--steps 0: a number from 1 on is needed"),
        (["eval", "nowhere"], "nowhere is no run of hfjax train: it has no config.yaml."),
        (["eval", "odd"], "odd is no run of hfjax train: its config.yaml is a folder."),
    ],
)
def test_a_command_that_makes_no_sense_ends_with_words(
    words, message, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hfjax.cli.train.start", lambda config: None)
    Path("run.yaml").write_text("steps: none")
    Path("run.py").write_text("config = 1")
    Path("odd/config.yaml").mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(words)
    assert message in capfd.readouterr().err


def test_the_help_of_train_has_all_that_turns_a_strategy_on(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["train", "--help"])
    told = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert all(f" --mesh.{axis} INT" in told for axis in AXES)
    for flag in ("zero {0,1,2,3}", "offload.optimizer", "offload.parameters"):
        assert f" --{flag}" in told
    assert "--sequence-parallel, --no-sequence-parallel" in told
    assert "--strategy STR Your own table of sharding rules: file.py:name of a hfjax.Str" in told


def test_a_command_that_is_none_is_told_with_those_there_are(capsys):
    assert main(["trian"]) == 2
    assert "hfjax trian: no such command" in (told := capsys.readouterr().err)
    assert "launch     start several processes" in told
    assert main([]) == 0 == main(["help"])
