"""Which form a kernel takes: what was asked for, what the device can run, what was measured."""

from dataclasses import dataclass

import jax
import pytest

import hfjax
from hfjax.__main__ import main
from hfjax.analysis.targets import GPUS
from hfjax.cli import kernels
from hfjax.models.gpt import next_token_loss
from hfjax.parallel.extensions.kernel_dispatch import choose_kernel as kernel_choice
from hfjax.parallel.extensions.kernel_dispatch.choose_kernel import choose_impl
from hfjax.parallel.extensions.kernel_dispatch.ops import Kernels
from hfjax.parallel.settings import KERNELS, KernelChoices
from tests.small_gpt import gpt_layout

H200 = GPUS["h200"]


@dataclass(frozen=True)
class Ampere:
    platform: str = "gpu"
    device_kind: str = "NVIDIA A100"
    compute_capability: str = "8.0"


@pytest.fixture
def measured(monkeypatch):
    when = {"jax": "0.11.2", "date": "2026-11-21"}
    of = lambda ratio, **shape: {"shape": shape, "ratio": ratio, "rival": "cuDNN", **when}
    rows = {
        "flash_block": [of(1.07, S=1024, D=64), of(1.2, S=4096, D=64), of(0.8, S=1024, D=128)],
        "cross_entropy": [of(0.9, N=16384, V=50304, D=768) | {"rival": "XLA"}],
    }
    monkeypatch.setattr(kernel_choice, "_load_measured", lambda: {"NVIDIA H200": rows})


def test_a_kernel_that_was_measured_to_win_is_taken(measured):
    taken = choose_impl(KernelChoices.of("auto"), "flash_block", H200, shape={"S": 1024, "D": 64})
    why = "measured 1.07x cuDNN at S=1024 D=64 on NVIDIA H200, jax 0.11.2"
    assert str(taken) == f"flash_block: pallas ({why})"


@pytest.mark.parametrize(
    ("shape", "form", "told"),
    [
        ({"S": 8192, "D": 64}, "pallas", "1.20x cuDNN at S=4096 D=64"),
        ({"S": 512, "D": 128}, "xla", "0.80x cuDNN at S=1024 D=128"),
        (None, "xla", "0.80x cuDNN at S=1024 D=128"),  # nothing is known of the operands
    ],
)
def test_operands_go_as_the_measured_shape_does_that_is_nearest(measured, shape, form, told):
    taken = choose_impl(KernelChoices.of("auto"), "flash_block", H200, shape=shape)
    assert taken.impl == form
    assert told in taken.why


def test_a_kernel_that_loses_is_not(measured):
    taken = choose_impl(KernelChoices.of("auto"), "cross_entropy", H200)
    assert taken.impl == "xla"
    assert "measured 0.90x XLA at N=16384 V=50304 D=768 on" in taken.why


def test_a_kernel_that_nobody_measured_is_not_taken(measured):
    taken = choose_impl(KernelChoices.of("auto"), "all_gather", H200)
    assert (taken.impl, taken.why) == (
        "xla",
        "not measured on NVIDIA H200 yet: `make gpu` measures",
    )


def test_what_was_measured_on_one_device_does_not_count_on_another(measured):
    assert choose_impl(KernelChoices.of("auto"), "flash_block", GPUS["h100"]).impl == "xla"


def test_operands_that_a_kernel_cannot_take_go_to_xla(measured):
    refusal = lambda: "head dim 80 is none of 64, 128"
    taken = choose_impl(KernelChoices.of("auto"), "flash_block", H200, refusal)
    assert (taken.impl, taken.why) == ("xla", "head dim 80 is none of 64, 128")


def test_a_kernel_that_was_asked_for_is_taken_unmeasured():
    assert choose_impl(KernelChoices.of("pallas"), "all_gather", H200).impl == "pallas"


def test_each_kernel_may_have_its_own_word():
    wanted = KernelChoices.of({"flash_block": "xla", "*": "pallas"})
    forms = {kernel: choose_impl(wanted, kernel, H200).impl for kernel in KERNELS}
    assert forms == {kernel: "pallas" for kernel in KERNELS} | {"flash_block": "xla"}


@pytest.mark.parametrize(
    ("device", "why"),
    [
        (jax.devices()[0], "a cpu device runs no kernel; they are written for Hopper"),
        (Ampere(), r"NVIDIA A100 has compute capability 8.0; .* \(9.0: H100, H200\)"),
    ],
    ids=["cpu", "A100"],
)
def test_asking_for_kernels_where_none_can_run_is_an_error(device, why):
    with pytest.raises(ValueError, match=f'kernels="pallas": flash_block cannot run here: {why}'):
        choose_impl(KernelChoices.of("pallas"), "flash_block", device)


def test_a_step_or_an_evaluation_refuses_kernels_that_cannot_run():
    layout = gpt_layout(hfjax.DDP, {"data": 1}, devices=jax.devices()[:1])
    for make in (hfjax.train_step, hfjax.eval_step):
        with pytest.raises(
            ValueError, match=r'kernels="pallas": a cpu device runs no kernel.*auto'
        ):
            make(layout, next_token_loss, kernels="pallas")


def test_what_was_chosen_is_told_of_all_arrays(monkeypatch):
    monkeypatch.setattr(kernel_choice, "cannot_run", lambda device: None)
    chosen = Kernels.of(KernelChoices.of("pallas"), hfjax.make_mesh(data=8), next_token_loss)
    for size, refusal in ((8, None), (4, "a piece is too small"), (16, None), (8, None)):
        chosen.array_impl("all_gather", lambda refusal=refusal: refusal, {"N": size})
    lines = [line.split("  ") for line in str(chosen).splitlines() if "all_gather " in line]
    assert [[cell.strip() for cell in line if cell] for line in lines] == [
        ["all_gather", "pallas", "asked for", "N=8; N=16"],
        ["all_gather", "xla", "a piece is too small", "N=4"],
    ]


def test_asking_for_a_kernel_that_cannot_take_its_operands_is_an_error():
    refusal = lambda: "head dim 80 is none of 64, 128"
    with pytest.raises(ValueError, match=r"flash_block cannot run here: head dim 80.*auto"):
        choose_impl(KernelChoices.of("pallas"), "flash_block", H200, refusal)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("triton", "kernels='triton': one of auto, pallas, xla, reference"),
        ({"flash": "xla"}, "'flash' is none of them: flash_block"),
        ({"flash_block": "no"}, "kernels='no': one of auto"),
        (["xla"], r"kernels=\['xla'\]: one of auto"),
        (None, "kernels=None: one of auto"),
    ],
    ids=["word", "kernel", "word of a kernel", "list", "nothing"],
)
def test_a_wrong_word_or_kernel_is_refused(given, told):
    with pytest.raises(ValueError, match=told):
        hfjax.Execution(kernels=given)


def test_the_command_shows_every_kernel_with_its_reason(capsys, monkeypatch):
    monkeypatch.setattr(kernel_choice, "_load_measured", dict)
    assert main(["kernels", "--gpu", "h200"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "NVIDIA H200"
    assert [line.split()[0] for line in shown[2:]] == list(KERNELS)
    assert all("xla" in line and "not measured" in line for line in shown[2:])


def test_the_command_shows_every_shape_that_was_measured(measured):
    lines = [line for line in kernels.table("auto", "h200").splitlines() if "flash_block" in line]
    shapes = ("S=1024 D=64", "S=4096 D=64", "S=1024 D=128")
    assert all(shape in line for shape, line in zip(shapes, lines, strict=True))
    assert ["pallas" in line for line in lines] == [True, True, False]
    assert kernels.table("xla", "h200").count("flash_block") == 1


def test_the_command_refuses_kernels_where_none_can_run(capsys):
    assert main(["kernels", "--kernels", "pallas"]) == 2
    assert "a cpu device runs no kernel" in capsys.readouterr().err


def test_the_table_is_of_the_device_here():
    assert kernels.table().splitlines()[0] == jax.devices()[0].device_kind


def test_a_kernel_that_wins_by_noise_is_not_taken(measured, monkeypatch):
    known = {
        "NVIDIA H200": {"flash_block": [{"shape": {}, "ratio": 1.01, "rival": "cuDNN", "jax": "0"}]}
    }
    monkeypatch.setattr(kernel_choice, "_load_measured", lambda: known)
    assert choose_impl(KernelChoices.of("auto"), "flash_block", H200).impl == "xla"
