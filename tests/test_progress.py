import io
import time

import pytest

from hfjax.base.progress import said_while


class Terminal(io.StringIO):
    def isatty(self):
        return True


def _said(out, seconds=0.2, **intervals):
    with said_while("compiling", out=out, **intervals):
        time.sleep(seconds)
    return out.getvalue()


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_what_is_quick_says_nothing(out):
    assert _said(out, seconds=0.0) == ""


def test_a_file_gets_one_line_after_the_silence():
    assert _said(io.StringIO(), first=0.01) == "compiling … 0 s\n"


def test_a_file_gets_another_line_now_and_then():
    lines = _said(io.StringIO(), first=0.01, every=0.02).splitlines()
    assert len(lines) > 1
    assert set(lines) == {"compiling … 0 s"}


def test_seconds_are_counted():
    assert _said(io.StringIO(), seconds=1.1, first=1.0) == "compiling … 1 s\n"


def test_a_terminal_has_one_line_that_is_removed_at_the_end():
    said = _said(Terminal(), first=0.01)
    assert said.startswith("\r| compiling … 0 s")
    assert said.endswith(f"\r{' ' * len('| compiling … 0 s')}\r")
    assert "\n" not in said


def test_a_long_line_does_not_break_on_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "12")
    turned = _said(Terminal(), first=0.01).split("\r")
    assert max(map(len, turned)) == 11


def test_standard_error_is_where_it_is_said(capsys):
    with said_while("compiling", first=0.01):
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "compiling … 0 s\n")


def test_an_error_passes_through_and_ends_the_line():
    out = Terminal()

    def fail():
        with said_while("compiling", first=0.01, out=out):
            time.sleep(0.1)
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    assert out.getvalue().endswith(" \r")
