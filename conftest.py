"""Eight fake CPU devices stand for a cluster in every test; compiling is quick, the code slow.

HFJAX_TEST_GPU=1 leaves the platform and the compiler alone: for tests marked gpu (`make gpu`).
"""

import os
import signal

FAST_COMPILES = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
ON_GPU = os.environ.get("HFJAX_TEST_GPU") == "1"
if not ON_GPU:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FAST_COMPILES}"

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

if not ON_GPU:
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked gpu are skipped where no GPU is."""
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU: `make gpu` where one is")
