"""Steps do what they did: losses to the last bit, collectives, bytes, text (golden.py)."""

import json

import pytest

from tests import golden

KNOWN = json.loads(golden.FILE.read_text(encoding="utf-8"))


@pytest.mark.short("context, Ulysses", "haiscale")  # .ci/run runs all
@pytest.mark.parametrize("name", golden.cases())
def test_a_step_does_what_it_did(name):
    wanted = KNOWN["cases"][name]
    golden.same(wanted, golden.told(golden.cases()[name]), KNOWN["here"])


def test_every_case_is_known():
    assert list(KNOWN["cases"]) == list(golden.cases())
