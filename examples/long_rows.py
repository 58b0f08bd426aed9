"""A GPT of bytes on rows of 32,768 tokens, each shared by eight devices; fake ones, on a CPU.

The text is the source of Python's own library. It shows that such rows run, not how
fast: on two cores it compiles for half a minute, and a step takes about two minutes. It takes one
step unless you say how many:

    python examples/long_rows.py [steps]
"""

import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import optax

import hfjax
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss

hfjax.simulate_devices(8)  # unless there are 8 GPUs

LENGTH = 32768


def text(size: int) -> bytes:
    """Return the first bytes of the source of Python's library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return b"".join(file.read_bytes() for file in files)[:size]


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    print("compiling, then about 2 minutes a step (on two cores) …", flush=True)
    config = GPTConfig.tiny(vocab=256, length=LENGTH, layers=2, embed=64, heads=4)
    mesh = hfjax.make_mesh(context=8)
    strategy = hfjax.FSDP | hfjax.CONTEXT
    layout = hfjax.layout(lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-3), mesh, strategy)
    step = hfjax.train_step(
        layout, next_token_loss, context="ring", remat="full", kernels="reference"
    )
    state = hfjax.init(layout)
    bytes_ = np.frombuffer(text(steps * LENGTH + 1), np.uint8).astype(np.int32)
    for number in range(steps):
        begun = time.time()
        row = bytes_[number * LENGTH : (number + 1) * LENGTH + 1]
        state, metrics = step(state, {"tokens": row[None]})
        told = f"step {number + 1}: loss {float(metrics['loss']):.3f}"
        print(f"{told}, {time.time() - begun:.0f} s", flush=True)
    print(step.context)


if __name__ == "__main__":
    main()
