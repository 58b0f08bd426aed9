"""`hfjax launch`: processes of one machine that live and end together."""

import io
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from hfjax.cli.launch import LaunchCommand, main, run, split_command
from hfjax.distributed import child_processes as output
from hfjax.distributed.child_processes import LineCopier, tag, visible_text
from hfjax.distributed.job import Limits
from hfjax.distributed.launcher import device_variables, launch, visible_gpus
from tests.workers import LIMIT, finished, launched, line, start

QUICK = Limits(grace=1, stop=5, backoff=0.1)


def sh(script):
    return ["sh", "-c", script]


def go(script, processes=2, restarts=0, limits=QUICK, **more):
    """Return the exit code of a launched script and what the launcher said."""
    said = []
    return launch(sh(script), processes, restarts, limits=limits, say=said.append, **more), said


def reaches(pid, states):
    """Wait until a process is in one of these states of /proc; Z stands for one that is gone."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            state = "Z"
        if state in states:
            return True
        time.sleep(0.1)
    return False


def ended(pid):
    """Wait until a process is no more, or only waits for its parent to hear of it."""
    return reaches(pid, "Z")


def test_each_process_is_told_who_it_is(capfd):
    told = "echo $HFJAX_PROCESS of $HFJAX_PROCESSES at $HFJAX_COORDINATOR, restart $HFJAX_RESTART"
    assert go(told, 3) == (0, [])
    lines = sorted(capfd.readouterr().out.splitlines())
    ports = {each.split("localhost:")[1].split(",")[0] for each in lines}
    assert len(ports) == 1
    assert lines == [f"[{i}] {i} of 3 at localhost:{min(ports)}, restart 0" for i in range(3)]


def test_a_job_on_one_machine_listens_to_that_machine_only(capfd):
    assert go("echo $JAX_COORDINATOR_BIND_ADDRESS $HFJAX_COORDINATOR $HFJAX_RUN")[0] == 0
    one, two = (line[4:].split() for line in capfd.readouterr().out.splitlines())
    assert one == two
    assert one[0] == one[1].replace("localhost", "127.0.0.1")
    assert len(one[2]) == 16


def test_output_and_errors_stay_apart_and_are_tagged_line_by_line(capfd):
    assert go("echo a; echo b >&2; printf c")[0] == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] a", "[0] c", "[1] a", "[1] c"]
    assert sorted(err.splitlines()) == ["[0] b", "[1] b"]


def test_one_process_writes_as_if_it_were_started_directly(capfd):
    assert go("printf 'a\\rb'; echo $HFJAX_PROCESSES >&2", 1)[0] == 0
    assert capfd.readouterr() == ("a\rb", "1\n")


def test_the_first_failure_ends_the_others_and_gives_the_exit_code():
    began = time.monotonic()
    code, said = go("test $HFJAX_PROCESS = 1 && exit 7; exec sleep 60", 3)
    assert code == 7
    assert said == ["process 1 failed with exit code 7; ending processes 0, 2"]
    assert time.monotonic() - began < LIMIT


def test_a_process_ended_by_a_signal_is_told_by_its_name():
    code, said = go("test $HFJAX_PROCESS = 0 && kill -KILL $$; exec sleep 60")
    assert (code, said) == (137, ["process 0 was ended by SIGKILL; ending process 1"])


@pytest.mark.parametrize("command", ["kill -STOP $$", "sh -c 'kill -STOP $$'"])
def test_a_suspended_process_is_named_for_whom_the_others_fail(command):
    stop = f"test $HFJAX_PROCESS = 1 && {command}; sleep 1; exit 3"
    code, said = go(stop, limits=Limits(grace=0.5))
    assert code == 3
    assert re.sub(r"pid \d+", "pid N", said[0]) == (
        "process 1 is suspended (SIGSTOP or a debugger; pid N): the others may fail for it"
    )
    assert said[1] == "process 0 failed with exit code 3; ending process 1"


def test_a_suspended_process_that_does_not_save_is_named():
    process = launched(["-n", 1, "--stop-timeout", 0.5], *sh("echo $$; kill -STOP $$"))
    assert reaches(line(process), "T")
    process.send_signal(signal.SIGTERM)
    [(status, _, err)] = finished(process)
    assert status == 124
    assert re.findall("launch: (.*)", re.sub(r"pid \d+", "pid N", err)) == [
        "SIGTERM: process 0 may take 0.5 s to save and end",
        "process 0 is suspended (SIGSTOP or a debugger; pid N)",
        "not ended after 0.5 s: killing process 0",
    ]


def test_who_does_not_end_is_killed_after_the_grace_period():
    script = (
        "test $HFJAX_PROCESS = 0 && sleep 0.5 && exit 3; trap '' TERM; while :; do sleep 1; done"
    )
    code, said = go(script, limits=Limits(grace=0.5))
    assert code == 3
    assert said[1:] == ["not ended 0.5 s after the failure: killing process 1"]


def test_what_a_process_started_ends_with_it(capfd):
    assert go("sleep 60 & echo $!")[0] == 0
    pids = [each.split()[1] for each in capfd.readouterr().out.splitlines()]
    assert len(pids) == 2
    assert all(ended(pid) for pid in pids)


def test_a_failed_job_starts_again_at_a_port_of_its_own(capfd):
    script = "echo $HFJAX_RESTART $HFJAX_COORDINATOR; test $HFJAX_RESTART = 2"
    code, said = go(script, 1, restarts=2)
    assert code == 0
    assert said == [
        "process 0 failed with exit code 1",
        "restart 1 of 2 in 0.1 s",
        "process 0 failed with exit code 1",
        "restart 2 of 2 in 0.2 s",
    ]
    starts = [each.split() for each in capfd.readouterr().out.splitlines()]
    assert [restart for restart, _ in starts] == ["0", "1", "2"]
    assert len({where for _, where in starts}) == 3


def test_restarts_end_with_the_exit_code_of_the_last_failure():
    code, said = go("exit $((4 + $HFJAX_RESTART))", 1, restarts=1)
    assert code == 5
    assert said[-1] == "process 0 failed with exit code 5"


def test_a_run_that_stopped_to_be_resumed_is_no_failure():
    assert go("exit 143", restarts=3) == (143, [])


def test_who_does_not_stop_with_the_others_is_killed():
    script = "test $HFJAX_PROCESS = 0 && exit 75; exec sleep 60"
    code, said = go(script, restarts=1, limits=Limits(stop=0.5))
    assert code == 124
    assert said == ["not ended after 0.5 s: killing process 1"]


SAVES = """
trap 'echo saved; exit 143' TERM; trap 'echo saved; exit 130' INT
echo ready; while :; do sleep 0.1; done
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)]
)
def test_a_signal_is_handed_on_and_all_may_save(number, code):
    process = launched(["-n", 2, "--max-restarts", 5], *sh(SAVES))
    assert [line(process), line(process)] == ["ready", "ready"]
    process.send_signal(number)
    [(status, out, err)] = finished(process)
    assert status == code
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]
    name = signal.Signals(number).name
    assert err == f"hfjax launch: {name}: processes 0, 1 may take 60 s to save and end\n"


DEAF = "trap '' TERM INT; echo ready; while :; do sleep 0.1; done"


def test_a_second_ctrl_c_kills_at_once():
    process = launched(["-n", 1], *sh(DEAF))
    assert line(process) == "ready"
    process.send_signal(signal.SIGINT)
    assert "SIGINT: process 0 may take 60 s" in line(process, "stderr")
    process.send_signal(signal.SIGINT)
    [(status, _, err)] = finished(process)
    assert (status, err) == (130, "hfjax launch: SIGINT again: killing process 0\n")


def test_who_does_not_save_in_time_is_killed():
    process = launched(["-n", 1, "--stop-timeout", 0.5], *sh(DEAF))
    assert line(process) == "ready"
    process.send_signal(signal.SIGTERM)
    [(status, _, err)] = finished(process)
    assert status == 124
    assert "not ended after 0.5 s: killing process 0" in err


def test_no_process_outlives_a_launcher_that_is_killed():
    process = launched(["-n", 2], *sh("sleep 60 & echo $$ $!; wait"))
    pids = [*line(process).split(), *line(process).split()]
    process.kill()
    assert len(pids) == 4
    assert all(ended(pid) for pid in pids)
    finished(process)


def test_a_signal_between_restarts_ends_the_job():
    process = launched(["-n", 1, "--max-restarts", 9], *sh("exit 4"))
    while "restart 2" not in line(process, "stderr"):
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert finished(process)[0][0] == 4


# -- refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "processes", "restarts", "told"),
    [
        (["true"], 0, 0, "0 processes: give at least 1"),
        (["true"], 1, -1, "-1 restarts: give 0 or more"),
        ([], 1, 0, "no command. Put it after --: hfjax launch -n 2 -- python train.py"),
        (["no-such-program"], 3, 0, "'no-such-program' .* launch -n 3 -- python no-such-program"),
    ],
)
def test_what_cannot_be_launched_is_refused(command, processes, restarts, told):
    with pytest.raises(ValueError, match=told):
        launch(command, processes, restarts)


def test_times_before_now_are_refused():
    with pytest.raises(ValueError, match="grace -1: give 0 seconds or more"):
        Limits(grace=-1)
    with pytest.raises(ValueError, match="stop timeout -2: give 0 seconds or more"):
        Limits(stop=-2)


# -- devices ---------------------------------------------------------------------------------


def test_fake_devices_are_asked_for_by_variables():
    assert device_variables(2, fake=3) == [{"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "3"}] * 2


@pytest.mark.parametrize(
    ("visible", "processes", "each", "shares"),
    [
        ("0,1,2,3", 2, None, ["0,1", "2,3"]),
        ("GPU-a,GPU-b", 2, None, ["GPU-a", "GPU-b"]),
        ("4,5,6,7", 2, 1, ["4", "5"]),
        ("0,1", 1, 1, ["0"]),
    ],
)
def test_gpus_are_dealt_among_the_processes(visible, processes, each, shares):
    dealt = device_variables(processes, None, each, {"CUDA_VISIBLE_DEVICES": visible})
    assert dealt == [{"CUDA_VISIBLE_DEVICES": share} for share in shares]


def test_without_gpus_or_for_one_process_nothing_is_set():
    assert device_variables(1, environment={"CUDA_VISIBLE_DEVICES": "0,1"}) == [{}]
    assert device_variables(2, environment={"CUDA_VISIBLE_DEVICES": ""}) == [{}, {}]
    assert visible_gpus({"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "0"}) == []


@pytest.mark.parametrize(
    ("processes", "each", "told"),
    [
        (3, None, "4 GPUs do not divide evenly among 3 processes. Give -n a divisor of 4"),
        (3, 2, "3 processes with 2 GPUs each need 6 GPUs, and 4 are visible. Lower -n or"),
        (2, 0, "0 GPUs for each process: give at least 1"),
    ],
)
def test_gpus_that_do_not_divide_are_refused(processes, each, told):
    with pytest.raises(ValueError, match=told):
        device_variables(processes, None, each, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})


def test_no_fake_devices_are_refused():
    with pytest.raises(ValueError, match="0 fake devices for each process: give at least 1"):
        device_variables(2, fake=0)


@pytest.mark.slow
def test_the_fake_devices_are_what_jax_sees():
    script = "import jax; print(jax.device_count())"
    run = launched(["-n", 1, "--devices-per-process", 3], sys.executable, "-c", script)
    assert finished(run)[0][:2] == (0, "3\n")


# -- output ----------------------------------------------------------------------------------


def copied(*pieces):
    """Return what is written for a stream that comes in pieces."""
    target = io.BytesIO()
    lines = LineCopier(io.BytesIO(), target, b"[0] ")
    for piece in pieces:
        lines.feed(piece)
    lines.end()
    return target.getvalue().decode().splitlines()


def test_a_line_is_written_whole_however_it_comes():
    assert copied(b"one li", b"ne\ntwo\nthr", b"ee") == ["[0] one line", "[0] two", "[0] three"]


def test_of_a_progress_bar_one_state_a_second_and_the_last_are_shown(monkeypatch):
    monkeypatch.setattr(output, "REDRAW", 1e9)
    states = [f"\r{percent} %".encode() for percent in range(0, 101, 20)]
    assert copied(*states, b"\n") == ["[0] 0 %", "[0] 100 %"]
    monkeypatch.setattr(output, "REDRAW", 0)
    assert copied(*states, b"\n") == [f"[0] {percent} %" for percent in range(0, 101, 20)]
    assert copied(b"99 %\r", b"100 %\r", b"\n") == ["[0] 99 %", "[0] 100 %"]


def test_empty_lines_and_those_of_other_systems_are_kept():
    assert copied(b"a\r\n\nb\n") == ["[0] a", "[0] ", "[0] b"]
    assert visible_text(b"") == b""


def test_tags_are_coloured_for_a_terminal():
    assert tag(1, colour=True) == b"\x1b[33m[1]\x1b[0m "


@pytest.mark.parametrize("errors", [False, True])
def test_a_job_whose_output_nobody_reads_is_told_to_save_and_end(errors):
    """Also if nobody reads its errors."""
    process = launched(["-n", 2, "--max-restarts", 5], *sh(SAVES))
    streams = ["stdout", "stderr"] if errors else ["stdout"]
    for name in streams:
        getattr(process, name).close()
        setattr(process, name, None)
    [(status, _, err)] = finished(process)
    assert status == 143
    said = "hfjax launch: standard output: Broken pipe: processes 0, 1 may take 60 s to save and"
    assert err is None if errors else err == f"{said} end\n"


def test_a_job_whose_errors_nobody_reads_goes_on():
    process = launched(["-n", 2], *sh("echo a >&2; sleep 0.5; echo b >&2; echo c"))
    assert process.stderr is not None
    process.stderr.close()
    process.stderr = None
    status, out, _ = finished(process)[0]
    assert (status, sorted(out.splitlines())) == (0, ["[0] c", "[1] c"])


# -- the command -----------------------------------------------------------------------------


def test_everything_after_the_first_two_dashes_is_the_command():
    assert split_command(["-n", "4", "--", "hfjax", "train", "--x"]) == (
        ["-n", "4"],
        ("hfjax", "train", "--x"),
    )
    assert split_command(["-n", "4"]) == (["-n", "4"], ())


def test_the_command_line_gives_the_exit_code(capfd):
    assert main(["--processes", "2", "--", *sh("echo $0 $1; exit 0"), "--x", "y"]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] --x y", "[1] --x y"]
    assert run(LaunchCommand(1, command=tuple(sh("exit 6")))) == 6


def test_mistakes_are_told_in_one_line(capfd):
    assert main(["-n", "0", "--", "true"]) == 2
    assert capfd.readouterr().err == "hfjax launch: 0 processes: give at least 1 (-n).\n"


def test_the_launcher_starts_no_device():
    source = (
        "from hfjax.cli.launch import main; import jax; main(['-n', '1', '--', 'true']);"
        "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    )
    assert finished(start(source))[0][:2] == (0, "False\n")


def test_the_greetings_of_a_cpus_collectives_are_left_out(capfd):
    assert go("echo '[Gloo] Rank 0 is connected to 1 peer ranks.'; echo seen")[0] == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] seen", "[1] seen"]


def test_a_mistake_that_no_restart_cures_is_not_tried_again():
    code, said = go("exit 2", restarts=3)
    assert code == 2
    assert not any("restart" in words for words in said)
