"""Files of machines: every number with its source, as before; what is wrong is refused by name."""

import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import hfjax.hardware
from hfjax.analysis.matmul_time import FusedAttention, ProductModel
from hfjax.analysis.targets import GPUS
from hfjax.hardware.machine import CONSTANTS, H200, MACHINES, Calibration, Machine, machine_of
from hfjax.trainer.logs.console import peak_flops

FOLDER = Path(hfjax.hardware.__file__).parent
PEAKS = {  # of the log's MFU, before there were files
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "V100": 125e12,
    "B200": 2250e12,
}
OLD_GPUS = {  # of `hfjax memory`: name, bytes, bytes a second
    "h100": ("NVIDIA H100", 85_899_345_920, 3_350_000_000_000),
    "h200": ("NVIDIA H200", 151_397_597_184, 4_800_000_000_000),
}


def test_the_numbers_are_those_that_the_log_the_commands_and_the_benchmarks_had():
    device = lambda kind: SimpleNamespace(device_kind=f"NVIDIA {kind} 80GB HBM3")
    assert {kind: peak_flops(device(kind)) for kind in PEAKS} == PEAKS
    assert peak_flops(jax.devices()[0]) is None
    assert {key: (m.name, m.memory, m.bandwidth) for key, m in GPUS.items()} == OLD_GPUS
    for gpu in GPUS.values():
        assert (gpu.device_kind, gpu.platform) == (gpu.name, "gpu")
        assert (gpu.compute_capability, gpu.sms, gpu.per_node) == ("9.0", 132, 8)
    assert (H200.inside, H200.between, H200.scheduled_flops) == (360e9, 40e9, 500e12)
    assert (H200.bandwidth, H200.start_up, H200.tile) == (4_800_000_000_000, 3e-6, (128, 256))


def test_every_file_is_named_by_its_key_and_no_device_is_two_machines():
    assert all(machine.key == key for key, machine in MACHINES.items())
    assert {"a100", "b200", "h100", "h200"} <= {*MACHINES}
    words = [word for machine in MACHINES.values() for word in machine.kinds]
    assert not [(a, b) for a in words for b in words if a != b and a in b]
    assert machine_of("cpu") is None


@pytest.mark.parametrize("key", MACHINES)
def test_every_constant_says_its_source(key):
    machine = MACHINES[key]
    for name in CONSTANTS:
        source = machine.source(name)
        known = ("data sheet", "white paper", "measured: ", "github.com/", "NVIDIA/nccl", "queries")
        assert source.startswith("assumed") or any(word in source for word in known), name
    for line in (FOLDER / f"{key}.toml").read_text().splitlines():
        assert len(line) <= 100
    assert tomllib.loads((FOLDER / f"{key}.toml").read_text())["kinds"] == list(machine.kinds)


def test_what_is_written_is_read_again(tmp_path):
    when = Calibration(device="cpu", jax="0.11.2", date="2026-11-26")
    told = {**H200.sources, "stream": 'measured: "a copy" \\ 2026-11-26'}
    for machine in (*MACHINES.values(), replace(H200, key="mine", sources=told, calibrated=when)):
        machine.write(tmp_path / "any.toml")
        assert Machine.load(tmp_path / "any.toml") == machine
        assert hash(Machine.load(str(tmp_path / "any.toml"))) == hash(machine)


def test_what_was_calibrated_elsewhere_is_refused():
    H200.check_calibrated_for("cpu", "0.11.2")  # a data sheet is for all
    mine = replace(H200, calibrated=Calibration("NVIDIA H200", "0.11.2", "2026-11-26"))
    mine.check_calibrated_for("NVIDIA H200", "0.11.2")
    with pytest.raises(ValueError, match=r"on NVIDIA H200 with jax 0\.11\.2 .*this is cpu with"):
        mine.check_calibrated_for("cpu", "0.11.2")
    with pytest.raises(ValueError, match=r"with jax 0\.12\.0\. Calibrate it again here"):
        mine.check_calibrated_for("NVIDIA H200", "0.12.0")


SMS = 'sms = { value = 132, source = "assumed" }'
WRONG = {
    "no toml": ("[[", "", "it is no TOML"),
    "unknown": (SMS + "\nwarp = 32", "", "warp: unknown. Allowed: .*, bandwidth, "),
    "missing": ("", "", r"sms: missing: \{ value = \.\.\., source = \"\.\.\.\" \} is needed"),
    "bare": ("sms = 132", "", "sms: 132: "),
    "more": ('sms = { value = 1, source = "s", unit = "" }', "", "sms: .*unit.* is needed"),
    "no source": ("sms = { value = 132 }", "", "sms: .* is needed"),
    "empty source": ('sms = { value = 132, source = " " }', "", r"sms\.source: ' ': name a data"),
    "a text": ('sms = { value = "132", source = "s" }', "", "sms: '132': a whole number is needed"),
    "a part": ('sms = { value = 1.5, source = "s" }', "", r"sms: 1\.5: a whole number is needed"),
    "true": ('sms = { value = true, source = "s" }', "", "sms: True: a whole number is needed"),
    "zero": ('sms = { value = 0, source = "s" }', "", "sms: 0: more than 0 is needed"),
    "not finite": (SMS, "peak", "peak: inf: more than 0 is needed"),
    "one number": (SMS, "tile", r"tile: inf: two numbers are needed, as in \[128, 256\]"),
    "below": (
        SMS + "\n[calibrated]\ndevice = 'a'",
        "",
        "calibrated: .*device, jax, date are",
    ),
    "date": (SMS + "\n[calibrated]\ndevice='a'\njax='b'\ndate=1", "", "calibrated.date: 1: a text"),
}


@pytest.mark.parametrize(("line", "infinite", "message"), WRONG.values(), ids=WRONG)
def test_a_file_that_is_wrong_is_refused_by_its_name_and_its_key(tmp_path, line, infinite, message):
    lines = (FOLDER / "h100.toml").read_text().splitlines()
    lines = [x for x in lines if not x.startswith(("sms =", f"{infinite or '?'} ="))]
    lines += [f'{infinite} = {{ value = inf, source = "s" }}'] if infinite else []
    (tmp_path / "mine.toml").write_text("\n".join([*lines, line]))
    with pytest.raises(ValueError, match=rf"mine\.toml: {message}"):
        Machine.load(tmp_path / "mine.toml")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("kinds = []", r"kinds: \[\]: a list of texts is needed"),
        ('kinds = "H100"', "kinds: 'H100': a list of texts"),
        ("platform = 1", "platform: 1: a text is needed"),
    ],
)
def test_what_a_machine_is_called_is_checked_too(tmp_path, line, message):
    name = line.split(" = ")[0]
    lines = (FOLDER / "h100.toml").read_text().splitlines()
    lines = [line if x.startswith(f"{name} =") else x for x in lines]
    (tmp_path / "mine.toml").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=rf"mine\.toml: {message}"):
        Machine.load(tmp_path / "mine.toml")


def test_rates_of_a_processor_that_older_versions_measured_are_passed_over(tmp_path):
    before = (FOLDER / "h100.toml").read_text() + "\n[processor]\nflops = 3e10\n"
    (tmp_path / "before.toml").write_text(before)
    assert Machine.load(tmp_path / "before.toml").sms == MACHINES["h100"].sms


def test_nothing_may_be_left_out_of_account(tmp_path):
    replace(H200, reserve=0).write(tmp_path / "mine.toml")
    assert Machine.load(tmp_path / "mine.toml").reserve == 0


# cuDNN's milliseconds on an H100 (benchmarks/results/gpu.md at 43fa166): forward, and with backward
CUDNN = {
    (1024, 64): (0.128, 0.598),
    (2048, 64): (0.203, 0.862),
    (4096, 64): (0.366, 1.411),
    (1024, 128): (0.105, 0.513),
    (4096, 128): (0.304, 1.214),
}


@pytest.mark.parametrize(("length", "width"), CUDNN)
def test_the_model_of_attention_gives_the_times_from_which_its_constants_are(length, width):
    h100 = replace(MACHINES["h100"], start_up=1e-9)
    call = FusedAttention(16384 // length, length, 1024 // width, width)
    forward, both = CUDNN[length, width]
    assert 1e3 * call.forward(h100) == pytest.approx(forward, rel=0.04)
    assert 1e3 * call.backward(h100) == pytest.approx(both - forward, rel=0.04)
    whole = replace(call, causal=False)
    assert call.forward(h100) < whole.forward(h100) < 2 * call.forward(h100)


def test_products_are_as_fast_as_the_machine_reaches_in_each_type():
    reached = [ProductModel.from_machine(H200, float32=wide) for wide in (False, True)]
    assert [model.flops for model in reached] == [H200.flops, H200.flops_fp32]
    assert {model.memory for model in reached} == {H200.stream}
