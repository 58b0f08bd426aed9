"""precision="auto": bfloat16 on GPUs that have it, otherwise as parameters are stored."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.hardware.machine import MACHINES
from hfjax.parallel.precision.auto import auto_precision, replace_auto
from hfjax.planner.make_plan import empty_plan
from hfjax.trainer import RunComponents, TrainConfig, load, train
from hfjax.trainer.config import MeshConfig, ModelConfig
from tests import h200
from tests.small_run import BIGRAMS, corpus, small

pytestmark = pytest.mark.auto_precision

BF16, STORED = hfjax.Precision("bfloat16"), hfjax.Precision()


@dataclass
class Device:
    platform: str
    compute_capability: Any = None


@pytest.mark.parametrize(
    ("device", "word"),
    [
        (Device("gpu", "9.0"), "bf16"),
        (Device("gpu", "8.0"), "bf16"),
        (Device("cuda", "12.0"), "bf16"),
        (Device("gpu", "7.5"), "stored"),  # T4
        (Device("gpu", "gfx90a"), "stored"),
        (Device("gpu", ""), "stored"),
        (Device("cpu"), "stored"),
        (Device("tpu", "9.0"), "stored"),
        (MACHINES["a100"], "bf16"),
    ],
    ids=lambda x: getattr(x, "compute_capability", None) or str(x),
)
def test_gpus_from_a100_on_compute_in_bfloat16(device, word):
    assert auto_precision(device, ["float32"]) == word


@pytest.mark.parametrize(
    ("dtypes", "word"),
    [
        (["float32", "bfloat16", "int32", "bool"], "bf16"),
        (["float32", "float64"], "stored"),
        (["float16"], "stored"),
        (["complex64"], "stored"),
        ([], "bf16"),
    ],
    ids=str,
)
def test_parameters_of_other_dtypes_keep_them(dtypes, word):
    assert auto_precision(MACHINES["h200"], dtypes) == word


def test_auto_may_stand_in_an_entry_by_path():
    assert replace_auto("auto", "bf16") == "bf16"
    assert replace_auto(" auto, *norm*=fp32", "bf16") == "bf16, *norm*=fp32"
    assert replace_auto("fp32,layers/*=auto", "bf16") == "fp32,layers/*=bf16"
    assert replace_auto({"*": "auto", "auto": "fp32"}, "bf16") == {"*": "bf16", "auto": "fp32"}
    assert replace_auto(BF16, "stored") is BF16


def _linear(dtype, devices=None, **execution):
    model = lambda rngs: nnx.Linear(8, 4, param_dtype=dtype, rngs=rngs)
    mesh = hfjax.make_mesh(data=-1, devices=devices)
    layout = hfjax.layout(model, optax.adam(0.1), mesh, hfjax.DDP)
    loss = lambda outputs, batch: (outputs.astype("float32") ** 2).mean()
    return layout, hfjax.train_step(layout, loss, **execution)


def test_a_step_on_cpus_computes_as_parameters_are_stored():
    assert _linear("float32")[1].execution.precision == STORED
    assert _linear("float32", precision="auto")[1].execution.precision == STORED
    by_path = _linear("float32", precision={"*": "auto", "bias": "bf16"})[1].execution.precision
    assert (by_path.compute, by_path.at("bias").compute) == (None, jnp.bfloat16)


@pytest.mark.cuda
def test_a_step_on_gpus_computes_in_bfloat16_and_keeps_and_reduces_in_float32():
    devices = h200.h200s()
    layout, step = _linear("float32", devices)
    assert step.execution.precision == BF16
    kernel = step.dtypes.dtypes["kernel"]
    assert (kernel.compute, kernel.gather, kernel.reduce) == (
        *(jnp.dtype("bfloat16"),) * 2,
        jnp.dtype("float32"),
    )
    state = layout.abstract_state()
    assert {x.dtype.name for x in (*state.params.values(), *state.optimizer[0].mu.values())} == {
        "float32"
    }
    program = step.lower(np.ones((16, 8), np.float32)).as_text()
    assert "bf16" in program
    assert _linear("bfloat16", devices)[1].execution.precision == BF16
    assert _linear("float32", devices, precision="stored")[1].execution.precision == STORED


@pytest.fixture(scope="module", name="data")
def fixture_data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus"))


def test_a_run_prints_the_precision_that_auto_stands_for_and_keeps_it(data, tmp_path, caplog):
    caplog.set_level("INFO", "hfjax")
    config = small(tmp_path, data, model=BIGRAMS, mesh=MeshConfig(data=1), steps=1)
    assert config.precision == "auto"
    train(config)
    assert caplog.messages[0].endswith(", precision stored")
    assert not any("precision:" in line for line in caplog.messages)
    assert load(tmp_path / "config.yaml").precision == "stored"
    caplog.clear()
    train(replace(config, steps=2))  # resumes: auto is what it was
    assert not any("--precision" in line for line in caplog.messages)
    caplog.clear()
    train(replace(config, steps=3, precision="bf16"))
    assert any("--precision bf16 (before: --precision stored)" in line for line in caplog.messages)


OWN_MODEL = """
import jax.numpy as jnp
from flax import nnx

def make(vocab, seq_len):
    class Bigrams(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Embed(vocab, vocab, param_dtype=jnp.float64, rngs=rngs)
        def __call__(self, batch):
            return self.table(batch["tokens"][:, :-1])
    return lambda rngs: Bigrams(rngs)
"""


def test_a_model_of_float64_keeps_it_on_gpus_that_have_bfloat16(data, tmp_path, monkeypatch):
    """Of a run, and of a plan: the model is asked, and not the GPU alone."""
    (tmp_path / "own.py").write_text(OWN_MODEL)
    model = ModelConfig(factory=f"{tmp_path}/own.py:make", seq_len=16)
    with jax.enable_x64(True):
        config = small(tmp_path / "run", data, model=model, mesh=MeshConfig(data=1), steps=1)
        monkeypatch.setattr("hfjax.parallel.precision.auto.has_bfloat16", lambda device: True)
        assert RunComponents(config).precision == "stored"
        plan = empty_plan(replace(config, mesh=MeshConfig()), gpu="h200", count=2)
        assert plan.config.precision == "stored"
    assert RunComponents(replace(config, model=BIGRAMS)).precision == "bf16"


def test_auto_beside_a_parameter_dtype_computes_in_bfloat16_either_way():
    assert auto_precision(MACHINES["h200"], ["bfloat16"]) == "bf16"
    step = _linear("bfloat16")[1]
    assert step.execution.precision == STORED
    assert step.dtypes.dtypes["kernel"].compute == jnp.bfloat16


def test_a_plan_for_gpus_takes_their_precision():
    config = TrainConfig(global_batch_size=16, model=ModelConfig(preset="gpt-tiny"))
    plan = empty_plan(config, gpu="h200", count=2, vocab=256)
    assert plan.config.precision == plan.scorer.config.precision == "bf16"
    assert plan.scorer.itemsizes == (2, 4, 4)  # compute, reduce, as stored


@pytest.mark.parametrize("word", ["automatic", "auto,*=fp32", "bf16,auto"])
def test_a_precision_that_does_not_exist_is_refused(word):
    with pytest.raises(ValueError, match=r"precision='"):
        TrainConfig(precision=word)


def test_the_error_of_a_wrong_word_has_auto_too():
    with pytest.raises(ValueError, match=r"precision='fp8': one of auto, stored, fp32, bf16"):
        _linear("float32", precision="fp8")


def test_an_execution_without_devices_refuses_auto():
    told = r'precision="auto": what it stands for depends on the devices, so only train_step, .*'
    auto: Any = "auto"
    with pytest.raises(ValueError, match=told):
        hfjax.Execution(precision=auto)
    with pytest.raises(ValueError, match=told):
        hfjax.PrecisionByPath({"*": "auto"})


@pytest.mark.cuda
def test_a_plan_in_bfloat16_for_short_sequences_reads_both_of_its_programs():
    """The tiles of the cross-entropy kernel: 2 x 64 tokens fill one, 3 x 64 would be padded."""
    h200.h200s()
    config = TrainConfig(global_batch_size=16, model=ModelConfig(preset="gpt-tiny"))
    assert hfjax.make_plan(config, gpu="h200", count=2, vocab=256).best.fits
