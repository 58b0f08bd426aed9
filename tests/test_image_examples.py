"""The examples of images learn on eight fake devices: digits, and shapes that they find."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def main(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


@pytest.mark.slow
def test_the_example_of_digits_splits_kernels_and_equals_one_device(capsys):
    accuracy, apart = main("digits")(epochs=1)
    assert accuracy > 0.5
    assert apart < 1e-5
    printed = capsys.readouterr().out
    assert 'layers/1/conv2/kernel      3x3x32x32  P(None, None, "fsdp")' in printed
    assert printed.count("gathered, 1.0 KiB  3 times") == 1  # one message for each norm
    assert printed.count("gathered, 2.0 KiB  3 times") == 1


@pytest.mark.slow
def test_the_example_of_shapes_scores_what_it_has_not_seen_and_draws_it(tmp_path, capsys):
    assert main("shapes")(steps=2, out=tmp_path / "shapes.png") < 0.3
    assert (tmp_path / "shapes.png").read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out.partition("taken for (column)\n")[2].splitlines()[1:5]
    counts = [int(word) for line in table for word in line.split()[1:5]]
    assert len(counts) == 16
    assert sum(counts) == 256 * 48 * 48  # each pixel once


@pytest.mark.slow
def test_the_example_of_digits_reads_those_that_it_has_not_seen():
    assert main("digits")()[0] >= 0.98


@pytest.mark.slow
def test_the_example_of_shapes_finds_them_in_images_that_it_has_not_seen(tmp_path):
    assert main("shapes")(out=tmp_path / "shapes.png") > 0.9
