"""The example of experts learns to read digits, on eight fake devices."""

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "moe_digits.py"


@pytest.mark.slow
def test_the_example_of_experts_reads_digits_that_it_has_not_seen(capsys):
    assert runpy.run_path(str(EXAMPLE))["main"]() > 0.95
    printed = capsys.readouterr().out
    assert "all_to_all" in printed
    assert "step 150: loss 0.0" in printed
    assert "accuracy on 256 digits that it has not seen: 0.9" in printed
