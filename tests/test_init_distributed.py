"""Processes find each other, or it is said in time who is missing or does not fit."""

import contextlib
import json
import signal
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import jax
import pytest
from jax._src.clusters import ClusterEnv

from hfjax.distributed import init
from hfjax.distributed.environment import SINGLE_PROCESS, Settings, find_settings
from hfjax.distributed.init import Cluster, init_distributed, preflight
from hfjax.distributed.ports import free_port, listener
from hfjax.distributed.rendezvous import RendezvousServer, find_conflict
from hfjax.distributed.wire_format import encode_hello, make_hello, parse_hello, parse_message
from tests.workers import finished, line, start

TORCHRUN = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "4"}
OURS = {"HFJAX_COORDINATOR": "node1:29500", "HFJAX_PROCESSES": "4", "HFJAX_PROCESS": "1"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
NODES = (
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "28672.0;tcp://10.0.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}


@pytest.fixture
def variables(monkeypatch):
    """A function that makes the variables given the only ones that tell of a run."""
    more = ("KUBERNETES_SERVICE_HOST", "CUDA_VISIBLE_DEVICES", *NODES)
    for name in (*TORCHRUN, *OURS, *SLURM, *OPEN_MPI, *more):
        monkeypatch.delenv(name, raising=False)
    return lambda given: [monkeypatch.setenv(name, value) for name, value in given.items()]


@pytest.mark.parametrize(
    ("given", "coordinator", "source"),
    [
        (OURS, "node1:29500", "hfjax's variables"),
        (TORCHRUN, "node1:29500", "torchrun's variables"),
        (TORCHRUN | {"MASTER_ADDR": "fd00::2"}, "[fd00::2]:29500", "torchrun's variables"),
        (SLURM, "node1:61447", "SLURM"),
        (OPEN_MPI, "10.0.0.1:61447", "Open MPI"),
        (SLURM | TORCHRUN, "node1:29500", "torchrun's variables"),
        (TORCHRUN | OURS, "node1:29500", "hfjax's variables"),
        (SLURM | {"MASTER_ADDR": "node1", "WORLD_SIZE": "4"}, "node1:61447", "SLURM"),
        (
            {"HFJAX_COORDINATOR": "node1:29500", "PMI_SIZE": "4", "PMI_RANK": "1"},
            "node1:29500",
            "hfjax's variables",
        ),
    ],
)
def test_settings_come_from_the_first_source_that_says_anything(
    variables, given, coordinator, source
):
    variables(given)
    found = find_settings(environment=given)
    assert (found.process, found.processes) == (1, 4)
    assert (found.coordinator, found.source) == (coordinator, source)


def test_arguments_come_before_all_variables():
    found = find_settings(("node9:1", 2, 0), OURS)
    assert (found.coordinator, found.process, found.processes) == ("node9:1", 0, 2)
    assert found.address == ("node9", 1)


@pytest.mark.parametrize(
    ("given", "source"),
    [
        ({}, "one process"),
        ({"HFJAX_PROCESSES": "1"}, "hfjax's variables"),
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, "torchrun's variables"),
        ({"WORLD_SIZE": "1"}, "torchrun's variables"),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, "SLURM"),
        ({"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}, "one process"),
    ],
)
def test_one_process_needs_no_coordinator(variables, given, source):
    variables(given)
    assert find_settings(environment=given) == replace(SINGLE_PROCESS, source=source)


@pytest.mark.parametrize(
    ("more", "gpu"),
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
        ({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}, 1),
        ({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "3"}, None),
    ],
)
def test_of_several_torchrun_processes_on_a_machine_each_takes_its_own_gpu(more, gpu):
    assert find_settings(environment=TORCHRUN | more).gpu == gpu


TWO_NODES = SLURM | {"SLURM_NTASKS": "2"}
SEVERAL = {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_NTASKS": "5", "SLURM_PROCID": "4"}
SAYS = ["process 1 of 2 is the only one on its node (SLURM): it takes all of its GPUs"]


@pytest.mark.parametrize(
    ("given", "gpus", "said"),
    [
        (TWO_NODES | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "1"}, "all", SAYS),
        (TWO_NODES | {"SLURM_STEP_NUM_NODES": "2"}, "all", SAYS),
        (SLURM | SEVERAL | {"SLURM_NODEID": "2"}, "all", [SAYS[0].replace("1 of 2", "4 of 5")]),
        (SLURM | SEVERAL | {"SLURM_NODEID": "1", "SLURM_LOCALID": "1"}, "1", []),
        (SLURM | {"SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "1"}, "1", []),
        (SLURM | {"SLURM_LOCALID": "1"}, "1", []),  # nobody says how many tasks are here
        (SLURM | {"SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "0"}, "all", []),  # its own
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            "all",
            ["process 1 of 4 is the only one on its node (Open MPI): it takes all of its GPUs"],
        ),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "0", []),
    ],
)
def test_a_process_takes_all_gpus_of_a_node_that_is_its_own(
    variables, monkeypatch, given, gpus, said
):
    """What JAX is given: None, where it detects nothing more, are all; else it takes one."""
    variables(given)
    monkeypatch.setattr(init, "preflight", lambda *_: 60.0)
    passed, told = [], []

    def initialize(*them, local_device_ids, cluster_detection_method, **_):
        if cluster_detection_method == "deactivate":
            passed.append(local_device_ids)
            return
        detect: Any = ClusterEnv.auto_detect_unset_distributed_params
        passed.append(detect(*them, local_device_ids, cluster_detection_method, 1)[3])

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(init.xla_bridge, "backends_are_initialized", lambda: False)
    init._join(find_settings(), 60, 10, told.append)
    assert passed == [None if gpus == "all" else [int(gpus)]]
    assert told == said


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"RANK": "1"}, "say RANK=1 but not MASTER_ADDR and MASTER_PORT and WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "say WORLD_SIZE=4 but not MASTER_ADDR and MASTER_PORT and RANK"),
        ({"HFJAX_PROCESS": "1", "HFJAX_PROCESSES": "4"}, "but not HFJAX_COORDINATOR. Set all of"),
        (OURS | {"HFJAX_PROCESSES": "four"}, "HFJAX_PROCESSES=four is not a whole number"),
        (TORCHRUN | {"RANK": "1.0"}, "RANK=1.0 is not a whole number"),
        (OURS | {"HFJAX_PROCESS": "4"}, "HFJAX_PROCESS=4 with HFJAX_PROCESSES=4: .* from 0"),
        (OURS | {"HFJAX_PROCESSES": "0"}, "HFJAX_PROCESS=1 with HFJAX_PROCESSES=0"),
        (OURS | {"HFJAX_COORDINATOR": "node1"}, "HFJAX_COORDINATOR=node1 is not an address"),
        (OURS | {"HFJAX_COORDINATOR": "node1:70000"}, "is not an address. Give host:port"),
        (
            {"OMPI_COMM_WORLD_SIZE": "4"},
            "OMPI_COMM_WORLD_SIZE=4 says several .* Set HFJAX_COORDINATOR=",
        ),
        (SLURM | {"SLURM_NTASKS": "x"}, "looks like SLURM, .* Set HFJAX_PROCESSES=1 for one"),
    ],
)
def test_settings_that_are_not_whole_are_refused_by_the_name_of_the_variable(
    variables, given, told
):
    variables(given)
    with pytest.raises(ValueError, match=told):
        find_settings(environment=given)


def test_arguments_that_are_not_whole_are_refused():
    with pytest.raises(ValueError, match="the arguments say processes=2 but not coordinator and"):
        find_settings((None, 2, None), {})


# -- the meeting -----------------------------------------------------------------------------

FIRST = replace(make_hello(0, 2), host="a", pid=1, token="x")
SECOND = replace(make_hello(1, 2), host="b", pid=2, token="y")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"process": 0}, "two .* number 0 of 2: pid 1 on a and pid 2 on b"),
        ({"processes": 3}, r"process 0 \(a, pid 1\) was told of 2 processes, process 1 .* of 3"),
        ({"jax": "0.1"}, r"has jax .*, process 1 \(b, pid 2\) has 0.1. All need the same"),
        ({"hfjax": "0.0"}, "has hfjax .*, process 1 .* has 0.0"),
    ],
)
def test_processes_that_do_not_fit_are_refused_by_name(change, told):
    assert find_conflict([FIRST, SECOND]) is None
    with pytest.raises(ValueError, match=told):
        raise ValueError(find_conflict([FIRST, replace(SECOND, **change)]))


def test_a_process_that_comes_again_is_not_a_second_one():
    assert find_conflict([FIRST, SECOND, SECOND]) is None


def meet(timeout, *processes, of, port=None):
    """Return what became of preflights of these numbers, each in a thread, and what was said."""
    port = port or free_port()
    ends, said = {}, []

    def attend(key, process):
        given = Settings(process, of, f"localhost:{port}", "the test")
        try:
            preflight(given, timeout, said.append)
            ends[key] = "joined"
            if process == 0:  # JAX would listen now
                stand_in.append(listener(port))
        except (ValueError, TimeoutError) as error:
            ends[key] = error

    stand_in = []
    threads = [threading.Thread(target=attend, args=pair) for pair in enumerate(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for one in stand_in:
        one.close()
    return list(ends.values()), said


def test_all_go_on_when_all_are_here():
    assert meet(10, 0, 1, 2, 3, of=4) == (["joined"] * 4, [])


def test_every_process_tells_in_time_who_is_missing(monkeypatch):
    monkeypatch.setattr("hfjax.distributed.rendezvous_client.REPORT_EVERY", 0.5)
    began = time.monotonic()
    ends, said = meet(1.6, 0, 2, of=4)
    assert time.monotonic() - began < 10
    for end in ends:
        assert isinstance(end, TimeoutError)
        assert "processes 1, 3 of 4 did not come within 1.6 s" in str(end)
    assert said[0] == "waiting for processes 1, 3 of 4 (1 s of 1.6)"


def test_a_process_that_cannot_reach_the_coordinator_says_so(monkeypatch):
    monkeypatch.setattr("hfjax.distributed.rendezvous_client.REPORT_EVERY", 0.5)
    port = free_port()
    [end], said = meet(1.6, 1, of=2, port=port)
    there = f"the coordinator at localhost:{port}"
    assert said[0].startswith(f"process 1 of 2 cannot reach {there}: Connection refused (1 s of")
    assert f"process 1 of 2 could not reach {there} within 1.6 s: Connection refused." in str(end)
    assert "is the address right (HFJAX_COORDINATOR)" in str(end)


@pytest.mark.parametrize("numbers", [(0, 1, 1), (0, 0, 1)])
def test_two_processes_of_one_number_are_refused_in_all(numbers, monkeypatch):
    monkeypatch.setattr("hfjax.distributed.rendezvous.LINGER", 0.5)
    ends, _ = meet(20, *numbers, of=3)
    assert len(ends) == 3
    for end in ends:
        assert isinstance(end, ValueError)
        assert "two processes say that they are number" in str(end)


def test_a_port_that_another_program_has_is_refused():
    with socket.create_server(("", 0)) as taken:
        [end], _ = meet(20, 0, of=2, port=taken.getsockname()[1])
    assert isinstance(end, ValueError)
    assert "process 0 cannot listen on port" in str(end)
    assert "Choose another port (HFJAX_COORDINATOR)" in str(end)


def test_another_program_at_the_coordinators_address_is_no_meeting():
    with socket.create_server(("", 0)) as taken:
        answer = lambda: [taken.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\n") for _ in "123"]
        threading.Thread(target=answer, daemon=True).start()
        [end], _ = meet(0.12, 1, of=2, port=taken.getsockname()[1])
    assert isinstance(end, TimeoutError)
    assert "whoever answered has left, or is another program" in str(end)


SAID = {"process": 1, "processes": 2, "host": "a", "pid": 3, "jax": "1", "hfjax": "1"}
SAID |= {"run": "", "token": "x"}
NONSENSE = [
    *(b"[" * 4000, b"", b"\xff\xfe", b"1", b"[]", b"null", b"NaN", b'{"hfjax": 1}', b'"' * 4000),
    b'{"hfjax": ' * 400,
    *(
        json.dumps({"hfjax": SAID | change}).encode()
        for change in (
            *({"process": wrong} for wrong in ([], {}, -1, 2, True, 0.5, "0", None, 1 << 40)),
            *({"host": wrong} for wrong in ([], None, 1, "\x1b[2J", "a" * 5000, "\n")),
            *({"processes": []}, {"pid": -1}, {"token": {}}, {"run": None}, {"more": 1}),
        )
    ),
]


def test_what_is_no_hello_is_nothing():
    assert parse_hello(json.dumps({"hfjax": SAID}).encode()) is not None
    for said in NONSENSE:
        assert parse_hello(said) is None, said


@pytest.mark.parametrize(
    "word",
    [
        {"missing": "12"},
        {"late": [], "seconds": 1},
        {"late": [1], "seconds": 10**400},
        {"late": [1]},
        {"late": [1], "seconds": "2"},
        {"refused": 1},
        {"go": 1},
        {},
    ],
)
def test_what_the_meeting_does_not_say_is_nothing(word):
    assert parse_message(json.dumps(word).encode()) is None
    assert parse_message(b'{"missing": ' * 5000) is None


def test_a_meeting_outlives_whatever_is_sent_to_it(monkeypatch):
    monkeypatch.setattr("hfjax.distributed.rendezvous.STRANGERS", 8)
    port, ends = free_port(), []
    held = RendezvousServer(listener(port), 2, 20, "ours")
    thread = threading.Thread(target=held.run)
    thread.start()
    strangers = [socket.create_connection(("localhost", port)) for _ in range(40)]
    for guest, said in zip(strangers, NONSENSE, strict=False):
        with contextlib.suppress(OSError):
            guest.sendall(said + b"\n")
    for name in ("theirs", "ours"):
        given = [Settings(n, 2, f"localhost:{port}", "the test", run_id=name) for n in (0, 1)]
        ends.append([socket.create_connection(("localhost", port)) for _ in given])
        for one, guest in zip(given, ends[-1], strict=True):
            guest.sendall(encode_hello(make_hello(one.process, 2, one.run_id)))
    thread.join(10)
    assert not thread.is_alive()
    answers = [[guest.makefile().readlines()[-1] for guest in pair] for pair in ends]
    assert all("another launcher or SLURM job" in answer for answer in answers[0])
    assert answers[1] == ['{"go": true}\n'] * 2
    for guest in (*strangers, *ends[0], *ends[1]):
        guest.close()


def test_a_server_that_never_ends_a_line_is_no_meeting():
    with socket.create_server(("", 0)) as taken:
        over = threading.Event()

        def flood():
            guest = taken.accept()[0]
            with contextlib.suppress(OSError):
                while not over.is_set():
                    guest.sendall(b"x" * 64)
                    time.sleep(0.001)

        threading.Thread(target=flood, daemon=True).start()
        [end], _ = meet(0.5, 1, of=2, port=taken.getsockname()[1])
        over.set()
    assert isinstance(end, TimeoutError)
    assert "within 0.5 s" in str(end)


def test_the_run_is_known_by_its_launcher_or_slurm_job(variables, monkeypatch):
    monkeypatch.delenv("HFJAX_RUN", raising=False)
    variables(SLURM)
    assert find_settings().run_id == "7"
    variables(OURS)
    assert find_settings().run_id == ""
    variables({"HFJAX_RUN": "secret"})
    assert find_settings().run_id == "secret"


# -- with JAX --------------------------------------------------------------------------------

JOIN = """
import hfjax.distributed.init as d
joined = d.init_distributed()
assert d.init_distributed() is joined
import jax, time
from hfjax.distributed.consensus import say
say("the first speaks")
print("joined", joined.process, joined.processes, jax.device_count(), joined.source)
"""


def own(process, port):
    return {
        "HFJAX_COORDINATOR": f"localhost:{port}",
        "HFJAX_PROCESSES": "2",
        "HFJAX_PROCESS": str(process),
    }


def torchrun(process, port):
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return where | {"RANK": str(process), "WORLD_SIZE": "2"}


def slurm(process, port):
    numbers = {"SLURM_PROCID": str(process), "SLURM_LOCALID": str(process), "SLURM_NTASKS": "2"}
    return numbers | {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "JAX_COORDINATOR_PORT": str(port),
    }


def open_mpi(process, port):
    return {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(process),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(process),
        "JAX_COORDINATOR_PORT": str(port),
    }


def of_jax(process, port):
    return {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(process),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables_of", "source"),
    [
        (torchrun, "torchrun's variables"),
        (slurm, "SLURM"),
        (open_mpi, "Open MPI"),
        (of_jax, "JAX's variables"),  # those of Kubeflow
    ],
)
def test_two_processes_join_by_the_variables_of(variables_of, source):
    port = free_port()
    ends = finished(*(start(JOIN, **variables_of(process, port)) for process in (0, 1)))
    for process, (status, out, err) in enumerate(ends):
        assert status == 0, err
        assert f"joined {process} 2 2 {source}" in out
        assert ("the first speaks" in out) == (process == 0)


@pytest.mark.slow
def test_two_processes_join_by_variables_of_hfjax_and_sigterm_still_ends_them():
    port = free_port()
    wait = f"{JOIN}time.sleep(60)"
    both = [start(wait, **own(process, port)) for process in (0, 1)]
    for number, process in enumerate(both):
        said = [line(process)]
        while "joined" not in said[-1]:
            assert process.poll() is None
            said.append(line(process))
        assert f"joined {number} 2 2 hfjax's variables" in said[-1]
        assert ("the first speaks" in "".join(said)) == (number == 0)
    for process in both:
        process.send_signal(signal.SIGTERM)
    assert [end[0] for end in finished(*both)] == [-signal.SIGTERM, -signal.SIGTERM]


def test_without_settings_it_is_one_process_and_nothing_is_started(variables, monkeypatch):
    monkeypatch.setattr(init, "_cluster", None)
    assert init_distributed() == Cluster(0, 1, None, "one process")
    assert not jax.distributed.is_initialized()


def test_it_must_come_before_the_first_computation(monkeypatch):
    monkeypatch.setattr(init, "_cluster", None)
    jax.devices()
    with pytest.raises(ValueError, match=r"process 0 of 2, but JAX has already started .* Call"):
        init_distributed("localhost:1", 2, 0)
