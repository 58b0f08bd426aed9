"""Eight fake CPU devices stand for a cluster in every test; compiling is quick, the code slow."""

import os
import signal

FAST_COMPILES = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FAST_COMPILES}"

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

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
