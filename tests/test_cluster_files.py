"""docs/cluster/: what SLURM and Kubernetes are given starts processes that train together."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hfjax.distributed.environment import OUR_VARS
from hfjax.distributed.ports import free_port
from tests.workers import environment, finished

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs/cluster/train.slurm"
MANIFEST = ROOT / "docs/cluster/train.yaml"
RUN = """\
steps: 2
global_batch_size: 4
mesh: {fsdp: -1}
model: {seq_len: 16, num_layers: 1, num_heads: 2, hidden_size: 32}
eval: {interval: 0}
log: {sample_tokens: 0, interval: 1}
"""
SRUN = """\
#!/bin/bash
# What srun does here: one task on each of two nodes, with the variables that SLURM sets.
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do
  SLURM_STEP_NODELIST=localhost SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE="1(x2)" \\
    SLURM_NTASKS=2 SLURM_PROCID=$node SLURM_NODEID=$node SLURM_LOCALID=0 "$@" &
  tasks[$node]=$!
done
worst=0
for task in "${tasks[@]}"; do
  wait $task; code=$?
  if [ $code -gt $worst ]; then worst=$code; fi
done
exit $worst
"""
HFJAX = f'#!/bin/bash\nexec {sys.executable} -W ignore -m hfjax "$@"\n'


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder of a job: run.yaml, .venv, and a bin with hfjax, srun and scontrol."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "HFJAX_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text(f"export PATH={tmp_path}/bin:$PATH\n")
    (tmp_path / "bin").mkdir()
    program(tmp_path, "hfjax", HFJAX)
    program(tmp_path, "srun", SRUN)
    program(tmp_path, "scontrol", '#!/bin/bash\necho "$@" > asked\n')
    return tmp_path


def program(place, name, text):
    (place / "bin" / name).write_text(text)
    (place / "bin" / name).chmod(0o755)


def submitted(place):
    """Start the script as a node does that SLURM gave the job to."""
    variables = {"SLURM_JOB_ID": "7", "JAX_COORDINATOR_PORT": str(free_port())}
    return subprocess.Popen(
        ["bash", SCRIPT],
        cwd=place,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_script_asks_slurm_for_what_its_first_lines_say():
    text = SCRIPT.read_text()
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    asked = dict(line.split("=", 1) for line in re.findall(r"(?m)^#SBATCH --(\S+=\S+)$", text))
    assert (asked["nodes"], asked["ntasks-per-node"]) == ("2", "1")
    assert asked["signal"] == "TERM@120"  # of the steps: no B:
    assert "#SBATCH --requeue\n" in text
    assert text.index("\n#SBATCH") < text.index("\nsource")  # SLURM stops reading at a command


@pytest.mark.slow
def test_two_tasks_of_the_script_join_and_train(place):
    [(status, out, err)] = finished(submitted(place), limit=300)
    assert status == 0, err
    assert "process 1 of 2 is the only one on its node (SLURM): it takes all of its GPUs" in out
    assert "FSDP on fsdp=2" in out
    assert "done: 2 steps; runs/books" in out
    assert (place / "runs/books/checkpoints").is_dir()
    assert not (place / "asked").exists()


@pytest.mark.parametrize(("code", "asked"), [(143, "requeue 7\n"), (1, None)])
def test_a_job_is_queued_again_only_after_sigterm(place, code, asked):
    program(place, "srun", f"#!/bin/bash\nexit {code}\n")
    [(status, _, _)] = finished(submitted(place))
    assert status == code
    assert ((place / "asked").read_text() if asked else None) == asked
    assert (place / "asked").exists() == (asked is not None)


def manifest():
    """Return the Service, the Job, and the container of its pods."""
    service, job = yaml.safe_load_all(MANIFEST.read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    [container] = job["spec"]["template"]["spec"]["containers"]
    return service, job, container


def variables_of(container, index):
    """Return the variables of pod `index`, as Kubernetes would set them."""
    fields = {
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
        "metadata.labels['batch.kubernetes.io/controller-uid']": "5f0c",
    }
    field = lambda given: fields[given["fieldRef"]["fieldPath"]]
    return {e["name"]: e.get("value") or field(e["valueFrom"]) for e in container["env"]}


def test_the_pods_are_as_many_as_processes_and_the_first_is_the_coordinator():
    service, job, container = manifest()
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    found = variables_of(container, 1)
    assert set(OUR_VARS) | {"HFJAX_RUN"} <= set(found)
    assert found["HFJAX_PROCESS"] == "1"
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(found["HFJAX_PROCESSES"])
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    host, _, port = found["HFJAX_COORDINATOR"].partition(":")
    assert host == f"{name}-0.{service['metadata']['name']}"
    assert port.isdecimal()


@pytest.mark.slow
def test_two_pods_join_and_train(place):
    _, _, container = manifest()
    [name, *arguments] = container["command"]
    here = {"HFJAX_COORDINATOR": f"localhost:{free_port()}"}  # no pod has a name here
    pods = [
        subprocess.Popen(
            [place / "bin" / name, *arguments],
            cwd=place,
            env=environment(**{**variables_of(container, index), **here}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in (0, 1)
    ]
    (status, out, err), (other, _, trouble) = finished(*pods, limit=300)
    assert (status, other) == (0, 0), err + trouble
    assert "FSDP on fsdp=2" in out
    assert "done: 2 steps; runs/books" in out


@pytest.mark.parametrize("path", [SCRIPT, MANIFEST], ids=lambda path: path.name)
def test_the_page_shows_the_file(path):
    page = (ROOT / "docs/several_nodes.md").read_text(encoding="utf-8")
    assert path.read_text(encoding="utf-8") in page
