"""Asked to stop, all processes stop at the same step; the second Ctrl-C does not wait."""

import os
import re
import signal
import sys
import threading

import pytest

from hfjax.distributed.exit_codes import exit_code, is_resumable
from hfjax.distributed.stop import Stop
from tests.workers import finished, launched, python

LOOP = """
import os, signal, sys, time
from hfjax.distributed.exit_codes import exit_code
from hfjax.distributed.init import init_distributed
from hfjax.distributed.stop import Stop
me = init_distributed().process
for what in ("request", signal.SIGINT, signal.SIGTERM):
    with Stop() as stop:
        for step in range(1000):
            if me == 1 and step == 5:
                stop.request() if what == "request" else os.kill(os.getpid(), what)
            if stop.agreed():
                break
    print("stopped at step", step, stop.reason, exit_code(stop.reason))
sys.exit(exit_code(stop.reason))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_agreed_on_at_once_in_one_process_and_handlers_come_back(number):
    before = signal.getsignal(number)
    with Stop() as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), number)
        assert stop.agreed()
        assert stop.agreed()
    assert stop.reason == signal.Signals(number).name
    assert signal.getsignal(number) is before


def test_a_program_may_ask_to_stop_itself():
    with Stop() as stop:
        stop.request()
        assert stop.agreed()
    assert stop.reason == "asked"


def test_a_second_ctrl_c_raises_at_once_but_a_second_sigterm_does_not():
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.agreed()


def test_under_nohup_a_hangup_does_not_ask():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.agreed()
    finally:
        signal.signal(signal.SIGHUP, before)


def unread():
    """Return a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


@pytest.mark.parametrize(
    ("opened", "words"),
    [(unread, "Broken pipe"), (lambda: open("/dev/full", "w"), "No space left on device")],
)
def test_standard_output_that_cannot_be_written_asks_to_stop(opened, words, monkeypatch, capfd):
    with opened() as stream:
        monkeypatch.setattr("sys.stdout", stream)
        with Stop() as stop:
            assert not stop.agreed()
            print("step 1", flush=True)
            assert stop.agreed()
            print("step 2", flush=True)
        assert sys.stdout is stream
    assert (stop.reason, exit_code(stop.reason)) == ("stdout", 143)
    said = f"standard output: {words}: stopping after this step\n"
    assert capfd.readouterr().err == said


def test_standard_error_that_cannot_be_written_ends_nothing(monkeypatch):
    with unread() as stream:
        monkeypatch.setattr("sys.stderr", stream)
        with Stop() as stop:
            print("words", file=sys.stderr, flush=True)
            assert not stop.agreed()


def test_a_reader_that_is_slow_is_no_loss(monkeypatch):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with open(reader), open(writer, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        with Stop() as stop:
            print("x" * 2**20, flush=True)  # more than a pipe holds
            assert not stop.agreed()
        os.set_blocking(writer, True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)


def test_outside_of_the_main_thread_it_is_refused():
    told = []

    def use():
        try:
            Stop().__enter__()
        except ValueError as error:
            told.append(str(error))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert told == ["Stop takes signals, which Python gives to the main thread only."]


@pytest.fixture(scope="module")
def asked_three_times():
    [(status, out, err)] = finished(launched(["-n", 2], *python(LOOP)))
    assert status == exit_code("SIGTERM"), err
    return out


@pytest.mark.parametrize(("reason", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("asked", 75)])
@pytest.mark.short("SIGINT-130")
def test_asked_in_one_process_both_stop_at_the_same_step(asked_three_times, reason, code):
    assert is_resumable(code)
    told = re.findall(rf"\[(.)\] stopped at step (\d+) {reason} (\d+)", asked_three_times)
    assert sorted(told) == [(me, "7", str(code)) for me in "01"]  # asked in 5, seen two calls later


def test_exit_codes_say_how_a_run_ended():
    assert [exit_code(reason) for reason in (None, "asked")] == [0, 75]
    assert [is_resumable(code) for code in (0, 1, 75, 124, 130, 143)] == [0, 0, 1, 0, 1, 1]


STEPS = """
import sys
from hfjax.distributed.init import init_distributed
from hfjax.distributed.stop import Stop
me = init_distributed().process
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("all",))
rows = jax.make_array_from_callback(
    (jax.device_count(), 64, 64), NamedSharding(mesh, P("all")), lambda _: np.ones((1, 64, 64))
)
step = jax.jit(lambda w, rows: w + 1e-3 * jnp.mean(jnp.tanh(rows @ w), (0, 1)))
w = jax.device_put(jnp.ones(64), NamedSharding(mesh, P()))
with Stop() as stop:
    for number in range(300):
        w = step(w, rows)
        if number == 200 and me == jax.process_count() - 1:
            stop.request()
        if stop.agreed():
            break
print("stopped at step", number, float(w[0]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (4, 1)])
def test_votes_go_along_with_the_collectives_of_the_steps(processes, devices):
    options = ["-n", processes, "--devices-per-process", devices]
    [(status, out, err)] = finished(launched(options, *python(STEPS)))
    assert status == 0, err
    found = re.findall(r"stopped at step (\d+) (\S+)", out)
    assert [number for number, _ in found] == ["202"] * processes
    [value] = {float(value) for _, value in found}
    assert value == pytest.approx(1 + 203e-3, rel=1e-4)  # each step adds tanh(64) / 1000
