"""A process that gets on no more is ended, and so is a run whose peer is dead or stopped."""

import signal
import time

import pytest

from hfjax.distributed.exit_codes import FAILED, HUNG, TERMINATED
from hfjax.distributed.ports import free_port
from hfjax.distributed.watchdog import Watchdog
from tests.workers import finished, launched, line, python, start

WATCH = """
import time
from hfjax.distributed.ports import free_port
from hfjax.distributed.watchdog import Watchdog
def stuck_here():
    time.sleep(60)
"""
PEERS = """
import os, signal, sys, time
from hfjax.distributed.init import init_distributed
from hfjax.distributed.stop import leaving
from hfjax.distributed.ports import free_port
from hfjax.distributed.watchdog import Watchdog
me = init_distributed(heartbeat=HEARTBEAT).process
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
split = NamedSharding(Mesh(np.array(jax.devices()), ("all",)), P("all"))
x = jax.make_array_from_callback((2,), split, lambda _: np.ones(1))
total = jax.jit(jnp.sum)
with leaving(), Watchdog(WATCHDOG) as watchdog:
    for step in range(100):
        watchdog.beat(f"step {step}")
        if me == 1 and step == 3:
            print("now", time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGNAL)
        assert int(total(x)) == 2
        time.sleep(0.05)
"""


def peers(watchdog: float | None = 60, heartbeat=60, signal="SIGSTOP"):
    source = PEERS.replace("HEARTBEAT", str(heartbeat)).replace("WATCHDOG", str(watchdog))
    return python(source.replace("SIGNAL", signal))


def test_without_a_beat_the_process_ends_and_tells_where_it_was():
    source = f"{WATCH}with Watchdog(1) as w:\n  w.beat('step 7')\n  stuck_here()"
    [(status, _, err)] = finished(start(source))
    assert status == HUNG == 124
    assert "no progress for 1 s, while doing: step 7. This process ends with exit code 124" in err
    assert "in stuck_here" in err


def test_a_process_that_hangs_ends_though_nobody_reads_its_errors():
    source = f"""{WATCH}
import os, sys
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 2)
with Watchdog(0.5):
    stuck_here()
"""
    assert finished(start(source))[0][0] == HUNG


def test_beats_and_slow_phases_that_are_allowed_keep_it_quiet_then_the_usual_limit_holds_again():
    source = f"""{WATCH}
with Watchdog(0.8) as w:
    with w.allow(30, "compiling"):
        time.sleep(1.2)
    for step in range(10):
        w.beat(f"step {{step}}")
        time.sleep(0.1)
time.sleep(1)
print("through", flush=True)
with Watchdog(0.5) as w:
    with w.allow(30, "saving"):
        pass
    stuck_here()
"""
    [(status, out, err)] = finished(start(source))
    assert (status, out) == (HUNG, "through\n"), err
    assert "no progress for 0.5 s, while doing: after saving" in err
    assert err.count("no progress") == 1


def test_time_in_which_the_process_itself_was_stopped_does_not_count():
    source = f"""{WATCH}
with Watchdog(1) as w:
    print("ready", flush=True)
    for step in range(10):
        time.sleep(0.1)
        w.beat("step")
print("through")
"""
    process = start(source)
    assert line(process) == "ready"
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    [(status, out, err)] = finished(process)
    assert (status, out) == (0, "through\n"), err


def test_no_timeout_means_no_watchdog_and_a_senseless_one_is_refused():
    with Watchdog(None) as watchdog, watchdog.allow(1, "anything"):
        watchdog.beat("step 0")
    with pytest.raises(ValueError, match="watchdog timeout 0: give seconds above 0, or None"):
        Watchdog(0)


@pytest.mark.slow  # in make test a job of `hfjax train` shows it: tests/test_run_processes.py
def test_a_stopped_process_trips_the_watchdog_of_the_other_and_is_killed():
    run = launched(["-n", 2, "--grace", 1], *peers(watchdog=3))
    [(status, out, err)] = finished(run)
    assert status == HUNG
    began = float(out.split("[1] now ")[1].split()[0])
    assert time.time() - began < 15
    assert "[0] no progress for 3 s, while doing: step 3" in err
    assert "process 0 failed with exit code 124; ending process 1" in err
    assert "not ended 1 s after the failure: killing process 1" in err


@pytest.mark.slow
def test_without_a_watchdog_the_heartbeat_ends_the_run():
    run = launched(["-n", 2, "--grace", 1], *peers(watchdog=None, heartbeat=3))
    [(status, out, _)] = finished(run)
    assert status not in (0, TERMINATED)
    assert time.time() - float(out.split("[1] now ")[1].split()[0]) < 20


@pytest.mark.slow
def test_when_a_process_dies_the_other_does_not_wait_for_it_at_the_exit():
    run = launched(["-n", 2, "--grace", 20], *peers(signal="SIGKILL"))
    [(status, out, err)] = finished(run)
    assert status == 128 + signal.SIGKILL
    assert time.time() - float(out.split("[1] now ")[1].split()[0]) < 15
    assert "process 1 was ended by SIGKILL" in err
    assert "killing" not in err


@pytest.mark.slow
def test_a_process_without_a_launcher_tells_of_its_dead_peer_and_leaves():
    port, source = free_port(), peers(signal="SIGKILL")[-1]
    where = {"HFJAX_COORDINATOR": f"localhost:{port}", "HFJAX_PROCESSES": "2"}
    both = [start(source, **where, HFJAX_PROCESS=str(process)) for process in (0, 1)]
    (status, _, err), (killed, _, _) = finished(*both)
    assert (status, killed) == (FAILED, -signal.SIGKILL)
    assert "Traceback" in err


@pytest.mark.parametrize(
    ("ending", "code", "told"),
    [
        ("ValueError('no such file')", FAILED, "[1] ValueError: no such file"),
        pytest.param("SystemExit(9)", 9, "failed with exit code 9", marks=pytest.mark.slow),
        pytest.param("SystemExit('in words')", FAILED, "[1] in words", marks=pytest.mark.slow),
    ],
)
def test_an_error_ends_a_process_of_several_at_once_with_its_own_exit_code(ending, code, told):
    source = f"""
from hfjax.distributed.init import init_distributed
from hfjax.distributed.stop import leaving
import sys, time
me = init_distributed().process
with leaving():
    if me == 1:
        raise {ending}
    time.sleep(60)
"""
    [(status, _, err)] = finished(launched(["-n", 2], *python(source)))
    assert status == code
    assert told in err
