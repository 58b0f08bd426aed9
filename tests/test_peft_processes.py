"""Two processes read an adapter and write it, and the merged model, as one process does."""

import json
import socket
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import hfjax
from hfjax.adapters import export_adapter, load_adapter
from tests.test_decoder import pretrained_of
from tests.test_peft_files import FILE, adapter_folder, arrays_of
from tests.workers import finished, start

WORKER = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
port, rank = map(int, sys.argv[1:3])
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
from tests.test_peft_processes import work
work(sys.argv[3])
"""


def work(root: str) -> None:
    """Read, write and merge an adapter; print the bytes that this process read and wrote."""
    place = Path(root)
    model = hfjax.pretrained(place / "base", pad_vocab_to=2)
    adapted = load_adapter(place / "adapter", model)
    strategy = hfjax.FSDP.edit(replicate_below=0) | hfjax.TENSOR
    mesh = hfjax.make_mesh(devices=jax.devices()[:4], fsdp=2, tensor=2)
    layout = hfjax.layout(adapted, optax.sgd(0.1), mesh, strategy)
    weights = adapted.weights
    state = hfjax.init(layout, parameters=weights)
    wrote = export_adapter(place / "out", layout, state)
    hfjax.export(place / "merged", layout, state, like=model)
    print(json.dumps({"read": weights.read, "wrote": wrote}), flush=True)


@pytest.mark.slow
def test_each_byte_is_read_and_written_by_one_process(tmp_path, capsys):
    for name in ("one", "two"):
        pretrained_of("llama2", _new(tmp_path / name) / "base")
        adapter_folder("llama2", tmp_path / name / "adapter")
    work(str(tmp_path / "one"))
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    workers = [start(WORKER, port, rank, tmp_path / "two") for rank in range(2)]
    ended = finished(*workers, limit=150)
    assert {status for status, *_ in ended} == {0}, ended
    told = [json.loads(out.splitlines()[-1]) for _, out, _ in ended]
    assert sum(x["wrote"] for x in told) == alone["wrote"]
    assert sum(x["read"] for x in told) == alone["read"]
    assert all(x["wrote"] for x in told)
    for file in (f"out/{FILE}", "merged/model.safetensors"):
        ours, theirs = (arrays_of(tmp_path / name / file) for name in ("one", "two"))
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(theirs[name], x) for name, x in ours.items())


def _new(path: Path) -> Path:
    path.mkdir()
    return path
