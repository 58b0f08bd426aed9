"""Eight H200s that nobody has: devices to compile for in tests."""

import pytest

from hfjax.analysis.targets import can_compile_for_gpus, target_devices

# conftest.py asks for quick, unoptimised CPU programs; a GPU program is read as it would run.
OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


def h200s(count=8):
    if not can_compile_for_gpus():
        pytest.skip("the wheels that compile for CUDA are not installed: see `make test-cuda`")
    return target_devices("h200", count)
