"""Eight fake CPU devices stand for a cluster in every test; compiling is quick, the code slow.

HFJAX_TEST_GPU=1 leaves the platform and the compiler alone: for tests marked gpu (`make gpu`).
"""

import functools
import gc
import math
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ON_GPU = os.environ.get("HFJAX_TEST_GPU") == "1"
FAST_COMPILES = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if version("jaxlib").startswith("0.10."):  # half the time; later versions know no other emitters
    FAST_COMPILES.append("--xla_cpu_use_fusion_emitters=false")
if not ON_GPU:
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FAST_COMPILES])
    # Programs without the lines of source that they come from: an eighth less to lower and compile.
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

# What one test has compiled no later one compiles again, in whichever worker or process it runs.
# A program that is read while another worker writes it fails its checksum and is compiled.
if "PYTEST_XDIST_WORKER" not in os.environ:
    programs = tempfile.TemporaryDirectory(prefix="hfjax-programs-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

gc.set_threshold(20_000)  # traces make many objects and little garbage: a tenth of the time

# Processes that tests start read hfjax's bytecode rather than compile its sources.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# As many interpreted warpgroups of fake devices may wait for each other, however few the cores.
os.environ.setdefault("PJRT_NPROC", "64")

# Tests that run in the background may ignore signals; what they start is not to.
for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

import jax  # noqa: E402  (the flags come first)
import pytest  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402
from jaxlib.mlir import ir  # noqa: E402

from hfjax.cli.log_handler import show_log  # noqa: E402

if not ON_GPU:
    jax.config.update("jax_platforms", "cpu")
# A context takes long to make: one for all saves a twentieth of the suite's time.
if version("jaxlib").startswith("0.10."):  # later versions share contexts themselves
    make_ir_context = mlir.make_ir_context
    for_all = functools.cache(make_ir_context)

    def shared() -> ir.Context:
        """Return one context for all programs; a new one while another program is lowered."""
        return for_all() if ir.Context.current is None else make_ir_context()

    mlir.make_ir_context = shared

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

collect_ignore = [] if find_spec("torch") else ["tests/pretrained/make_fixtures.py"]
collect_ignore += [] if find_spec("peft") else ["tests/adapters/make_fixtures.py"]
collect_ignore += [] if find_spec("torchvision") else ["tests/make_vision.py"]
# Examples that set the devices of their process would set those of all tests.
sets_devices = lambda path: "jax_num_cpu_devices" in path.read_text(encoding="utf-8")
collect_ignore += [str(path) for path in Path("examples").glob("*.py") if sets_devices(path)]
if jax.__version_info__ < (0, 11, 2):  # what they add to is not there yet
    collect_ignore += ["tests/interpreter.py", "tests/interpreter_memory.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """--budget, or --budget=accept, or --budget=all: see tests/budget.py."""
    words = "fail where a file of tests compiles, traces or starts more than tests/budget.json says"
    parser.addoption(
        "--budget", nargs="?", const="check", choices=["check", "all", "accept"], help=words
    )


def pytest_configure(config: pytest.Config) -> None:
    """Count what each file of tests costs."""
    from tests.budget import Budget

    config.pluginmanager.register(Budget(config.getoption("--budget")))


@pytest.hookimpl(tryfirst=True)  # before -m takes its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked short(cases) mark the other cases slow; the slowest files come first."""
    from tests.budget import slowest_first

    slowest_first(items)
    families: dict[str, tuple[tuple[str, ...], set[str]]] = {}
    for item in items:
        if mark := item.get_closest_marker("short"):
            test, _, case = item.nodeid.removesuffix("]").partition("[")
            families.setdefault(test, (mark.args, set()))[1].add(case)
            item.own_markers = [m for m in item.own_markers if m.name != "slow"]
            if case not in mark.args:
                item.add_marker("slow")
    if any("::" in arg for arg in config.args):
        return  # only some cases are collected
    for test, (chosen, cases) in families.items():
        if unknown := set(chosen) - cases:
            raise pytest.UsageError(f"{test}: short{tuple(unknown)}: it has the cases {cases}")


@pytest.fixture(autouse=True)
def stored_precision(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as parameters are stored by default, also for GPUs: laws count bytes of float32."""
    if "auto_precision" not in request.keywords:
        monkeypatch.setattr("hfjax.parallel.precision.auto.BFLOAT16_CAPABILITY", math.inf)


@pytest.fixture
def shown_log():
    """Show what the library logs on standard output, as a command does."""
    with show_log():
        yield


@pytest.fixture
def short_cases(request: pytest.FixtureRequest) -> Callable[..., dict[str, Any]]:
    """Return what keeps the named cases of a test that runs them together, in `make test`."""
    short = "not slow" in request.config.option.markexpr
    return lambda cases, *names: {k: v for k, v in cases.items() if k in names or not short}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked gpu are skipped where no GPU is."""
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU: `make gpu` where one is")
