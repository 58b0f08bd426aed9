"""The recipe of a step says what it does, and stays short."""

import ast
import inspect
import re

from hfjax.step import build


def test_the_stations_are_the_calls_in_order():
    told = re.findall(r"(?m)^\d+\. (.*?)(?::|\.$)", build.__doc__ or "")
    stations = [name for line in told for name in re.findall(r"`(\w+)`", line)]
    body = ast.parse(inspect.getsource(build.build_step))
    calls = [node for node in ast.walk(body) if isinstance(node, ast.Call)]
    calls = sorted(calls, key=lambda node: node.lineno)
    assert stations == [ast.unparse(node.func) for node in calls]


def test_it_is_read_in_one_go():
    assert len(inspect.getsource(build).splitlines()) <= 150
