import io
import math
import time
from types import SimpleNamespace

import pytest

from hfjax.trainer.logs import console
from hfjax.utils.progress import show_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def _said(out, seconds=0.2, **intervals):
    with show_progress("compiling", terminal=out, **intervals):
        time.sleep(seconds)
    return out.getvalue()


def _logged(caplog, seconds=0.2, **intervals):
    caplog.set_level("INFO", "hfjax")
    with show_progress("compiling", **intervals):
        time.sleep(seconds)
    return caplog.messages


def test_what_is_quick_says_nothing(caplog):
    assert _said(Terminal(), seconds=0.0) == ""
    assert _logged(caplog, seconds=0.0) == []


def test_the_log_gets_one_line_after_the_silence(caplog):
    assert _logged(caplog, first=0.01) == ["compiling … 0 s"]


def test_the_log_gets_another_line_now_and_then(caplog):
    lines = _logged(caplog, first=0.01, every=0.02)
    assert len(lines) > 1
    assert set(lines) == {"compiling … 0 s"}


def test_seconds_are_counted(caplog):
    assert _logged(caplog, seconds=1.1, first=1.0) == ["compiling … 1 s"]


def test_a_terminal_has_one_line_that_is_removed_at_the_end():
    said = _said(Terminal(), first=0.01)
    assert said.startswith("\r| compiling … 0 s")
    assert said.endswith(f"\r{' ' * len('| compiling … 0 s')}\r")
    assert "\n" not in said


def test_a_long_line_does_not_break_on_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "12")
    turned = _said(Terminal(), first=0.01).split("\r")
    assert max(map(len, turned)) == 11


def test_a_command_says_it_on_standard_error(capsys, shown_log):
    with show_progress("compiling", first=0.01):
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "compiling … 0 s\n")


def test_an_error_passes_through_and_ends_the_line():
    out = Terminal()

    def fail():
        with show_progress("compiling", first=0.01, terminal=out):
            time.sleep(0.1)
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    assert out.getvalue().endswith(" \r")


# -- steps a second -----------------------------------------------------------------------


class Device:
    """Steps on a device with a clock of its own, which does one after the other."""

    def __init__(self, monkeypatch):
        self.time, self.free = 0.0, 0.0
        monkeypatch.setattr(console, "time", SimpleNamespace(perf_counter=lambda: self.time))
        device = SimpleNamespace(platform="cpu", device_kind="cpu")
        mesh = SimpleNamespace(
            size=1, local_devices=[device], devices=SimpleNamespace(flat=[device])
        )
        task = SimpleNamespace(unit="images", units_per_example=1, flops=lambda layout: 1.0)
        config = SimpleNamespace(global_batch_size=8)
        self.speed = console.SpeedMeter(
            SimpleNamespace(task=task, mesh=mesh, config=config, layout=None)  # pyright: ignore
        )

    def step(self, seconds: float) -> SimpleNamespace:
        """Begin a step; return what tells when it has ended."""
        self.free = end = max(self.free, self.time) + seconds
        is_ready, block = lambda: self.time >= end, lambda: self.wait(end)
        self.speed.begin(SimpleNamespace(is_ready=is_ready, block_until_ready=block))
        return SimpleNamespace(end=end)

    def wait(self, until: float) -> None:
        self.time = max(self.time, until)

    def rate(self, step: SimpleNamespace) -> float | None:
        """Wait for a step as who reads its metrics does; return the images a second."""
        self.wait(step.end - 0.125)  # on the device that is first
        self.speed.count_step()
        return self.speed.measure().get("images_per_second")

    def run(self, waits: list[float], seconds: float, drained: int) -> list[float | None]:
        """Return the rate of each step, read two steps later, or at once after `drained` steps."""
        rates, unread = [], []
        for number, wait in enumerate(waits, 1):
            with self.speed.waiting_for_batch():
                self.time += wait
            unread.append(self.step(seconds))
            while len(unread) > (0 if number == drained else 2):
                rates.append(self.rate(unread.pop(0)))
        return rates + [self.rate(step) for step in unread]


@pytest.mark.parametrize(
    ("wait", "seconds", "last"), [(2.0, 1.0, 8.0), (0.5, 2.0, 4.0), (0.0, 2.0, 4.0)]
)
def test_each_step_tells_its_own_rate_whenever_it_is_read(monkeypatch, wait, seconds, last):
    """8 images in 2 seconds, of the data or of the device; three steps are read at once."""
    rates = Device(monkeypatch).run([wait] * 9, seconds, drained=9)
    assert rates == [None, *[4.0] * 7, last]  # the last one waits for no further batch


def test_batches_that_come_at_once_after_a_wait_tell_no_impossible_rate(monkeypatch):
    """Steps of a second; every third batch is waited for, longer than the steps before take."""
    device = Device(monkeypatch)
    first, *rates = device.run([9.0, 0.0, 0.0] * 3, 1.0, drained=0)
    assert first is None
    assert max(rate or math.inf for rate in rates) == 8.0
    assert sum(8 / (rate or math.inf) for rate in rates) == device.time - 10


def test_what_is_between_steps_counts_for_none(monkeypatch):
    device = Device(monkeypatch)
    assert device.run([0.0] * 4, 2.0, drained=4) == [None, 4.0, 4.0, 4.0]
    device.speed.pause()
    device.time += 100  # a validation
    assert device.run([0.0] * 3, 2.0, drained=3) == [None, 4.0, 4.0]


def test_the_time_that_is_left_is_that_of_steps_like_the_last_ones(monkeypatch):
    device = Device(monkeypatch)
    assert device.speed.seconds_left(5) is None
    device.run([0.0] * 3, 2.0, drained=3)
    assert device.speed.seconds_left(5) == 10.0
    device.speed.pause()
    assert device.speed.seconds_left(3) == 6.0
