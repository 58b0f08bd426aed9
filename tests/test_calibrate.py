"""Constants of the devices at hand: measured, written, guarded; and work, by counting.

No test looks at a time: sizes are tiny, and others use the cores too.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from hfjax.machines.machine import CONSTANTS, OF_PROCESSORS, Machine, Processor
from hfjax.planner.candidate import Candidate
from hfjax.planner.measuring.calibrate import calibrate, of_cpu, of_gpu
from hfjax.planner.measuring.stopwatch import Stopwatch
from hfjax.planner.measuring.work import idle_slots_compute, work
from hfjax.planner.score import Scorer
from hfjax.run.config import Model, Train

BRIEF = {"block": 0.001, "rounds": 1}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, Machine, list[str]]:
    """Return a file, its machine, and what was told."""
    path, told = tmp_path_factory.mktemp("here") / "here.toml", []
    return path, calibrate(path, told.append, quick=True), told


def test_file_is_written_and_loads(written):
    path, machine, told = written
    assert Machine.load(path) == machine
    assert (machine.key, machine.platform, machine.sms, machine.tile) == ("cpu", "cpu", 1, (1, 1))
    assert machine.per_node == jax.device_count()
    assert told[-1] == f"written: {path}"
    assert "transfers" in told


def test_every_constant_says_where_it_is_from(written):
    _, machine, _ = written
    assert machine.processor is not None
    assert set(machine.processor.sources) == set(OF_PROCESSORS)
    for name in ("flops", "flops_fp32", "stream", "launch", "start_up", "inside"):
        assert machine.source(name).startswith("measured: hfjax plan --calibrate here, 20")
    for name in ("tile", "sms", "between", "host_link", "attention_forward_64"):
        assert machine.source(name).startswith("assumed: ")


def test_guards(written):
    _, machine, _ = written
    kind = jax.devices()[0].device_kind
    machine.check_calibrated_for(kind, jax.__version__)
    with pytest.raises(ValueError, match="Calibrate it again here"):
        machine.check_calibrated_for(kind, "0.0.1")
    with pytest.raises(ValueError, match="this is NVIDIA H100"):
        machine.check_calibrated_for("NVIDIA H100", jax.__version__)


def test_one_device_sends_nothing():
    machine = of_cpu(Stopwatch(jax.devices()[:1], True, **BRIEF), quick=True)
    assert machine.processor is not None
    assert machine.source("inside") == machine.processor.sources["gathered"]
    assert machine.source("inside").startswith("assumed: ")
    assert machine.inside == machine.stream


def test_path_of_gpus_runs_here():
    """By the clock, with the attention that this device has."""
    machine = of_gpu(Stopwatch(jax.devices()[:2], False, **BRIEF), quick=True)
    assert machine.platform == "gpu"
    assert machine.processor is None
    for name in ("flops", "inside", "inside_hop", "attention_backward_128", "launch"):
        assert machine.source(name).startswith("measured: ")
        assert getattr(machine, name) > 0
    for name in ("between", "tile", "peak", "per_node"):
        assert machine.source(name).startswith("assumed: ")
    assert set(machine.sources) == set(CONSTANTS)


def test_refuses_other_devices(tmp_path):
    with pytest.raises(ValueError, match=r"'tpu'. Allowed: gpu, cpu"):
        calibrate(tmp_path / "x", devices=[SimpleNamespace(platform="tpu")])


def test_processor_of_a_file_is_checked(written, tmp_path):
    path, _, _ = written
    lines = path.read_text(encoding="utf-8").splitlines()
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("\n".join(x for x in lines if not x.startswith("turned")), encoding="utf-8")
    with pytest.raises(ValueError, match=r"wrong.toml: processor: .* turned, .* are needed"):
        Machine.load(wrong)


# -- work, by counting -----------------------------------------------------------------------

LAYERS, WIDTH, HEADS, LENGTH, ROWS, VOCAB = 4, 32, 2, 16, 8, 128
MUCH = 1e30


@pytest.fixture(scope="module")
def counting(written) -> Machine:
    """Return a machine whose seconds are 1e9 operations of products: all else takes none."""
    _, machine, _ = written
    assert machine.processor is not None
    none = Processor(**dict.fromkeys(OF_PROCESSORS, MUCH), sources=machine.processor.sources)
    rates = dict.fromkeys(("stream", "inside"), MUCH)
    starts = dict.fromkeys(("start_up", "launch", "inside_start"), 1 / MUCH)
    return replace(machine, processor=none, flops_fp32=1e9, **rates, **starts)


def scorer(machine: Machine, **more) -> Scorer:
    model = Model("gpt-tiny", layers=LAYERS, embed=WIDTH, heads=HEADS, length=LENGTH)
    return Scorer(Train(model=model, batch=ROWS, **more), VOCAB, machine, None)


def operations() -> tuple[float, float]:
    """Return the operations of layers and of the head, of all rows: forward, then twice that.

    Attention is in four blocks of queries: 5/8 of the scores.
    """
    tokens = ROWS * LENGTH
    scores = 2 * 2 * ROWS * LENGTH**2 * 5 / 8 * WIDTH
    layer = 2 * tokens * 12 * WIDTH**2 + scores
    return 3 * LAYERS * layer, 3 * 2 * tokens * WIDTH * VOCAB


def test_work_counts_operations_of_all_devices(counting):
    layers, head = operations()
    of = scorer(counting)
    for sides in (("data", 4),), (("data", 2), ("tensor", 2)):
        found = work(of, Candidate(sides, "ddp", ROWS))
        assert found.products == pytest.approx((layers + head) / 1e9, rel=1e-6)
        assert found.total == pytest.approx(found.products, rel=1e-6)


def test_work_of_idle_slots(counting):
    """Idle slots are skipped, but where layers send: there all ticks that have a slot count."""
    layers, head = operations()
    of, how = scorer(counting), {"schedule": "1f1b", "microbatches": 4}
    skips = Candidate((("pipe", 2), ("data", 2)), "ddp", ROWS, **how)
    computes = Candidate((("pipe", 2), ("tensor", 2)), "ddp", ROWS, **how)
    assert not idle_slots_compute(skips)
    assert idle_slots_compute(computes)
    assert work(of, skips).products == pytest.approx((layers + head) / 1e9, rel=1e-6)
    # five ticks run forward slots and as many backward ones, for four microbatches
    expected = (5 / 4 * layers + head) / 1e9
    assert work(of, computes).products == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_work_counts_bytes_of_transfers(counting):
    """The sums of gradients of DDP: each device sends all but a part of them twice."""
    sending = replace(counting, inside=1e9)
    found = work(scorer(sending), Candidate((("data", 4),), "ddp", ROWS))
    elements = sum(a.layer_size * (a.shape[0] if a.path.startswith("layers") else 1)
                   for a in scorer(sending).arrays.arrays)  # fmt: skip
    assert found.transfers == pytest.approx(4 * 2 * 3 / 4 * 4 * elements / 1e9, rel=1e-6)


def test_recomputing_takes_less_new_memory(counting):
    assert counting.processor is not None
    clearing = replace(counting, processor=replace(counting.processor, fresh=1e9))
    of = scorer(clearing)
    kept, again = (
        work(of, Candidate((("data", 4),), "ddp", ROWS, remat=remat)) for remat in ("none", "full")
    )
    assert again.fresh < kept.fresh
    assert again.products > kept.products


def test_work_is_of_cpus(counting):
    gpu = replace(counting, processor=None)
    with pytest.raises(ValueError, match="calibrate wrote"):
        work(scorer(gpu), Candidate((("data", 4),), "ddp", ROWS))
