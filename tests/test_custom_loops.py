"""The examples of loops of one's own: a GAN, two losses, a teacher under another layout."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def main(name, **options):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](**options)


@pytest.mark.slow
def test_a_gan_writes_digits_that_a_classifier_reads(tmp_path):
    seen, sure = main("gan", picture=str(tmp_path / "digits.png"))
    assert len(seen) >= 8
    assert sure > 0.5
    assert (tmp_path / "digits.png").stat().st_size > 1000


@pytest.mark.slow
def test_two_losses_that_disagree_are_both_learnt():
    accuracy, error, conflicts = main("two_losses")
    assert accuracy > 0.75
    assert error < 0.05
    assert conflicts > 20


@pytest.mark.slow
def test_a_student_learns_what_its_teacher_knows():
    teacher, student = main("distill")
    assert teacher > 0.85
    assert student > teacher - 0.03
