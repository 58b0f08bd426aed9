"""Training needs jax, flax, optax, orbax and numpy: grain and tyro are asked for when used."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BARE = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("grain", "tyro", "tokenizers", "pyarrow"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refused())
"""
TRAINS = """
import jax
jax.config.update("jax_platforms", "cpu")
import numpy as np, optax, hfjax
import benchmarks.offload
import hfjax.models.llama, hfjax.optimizers, hfjax.testing
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss

config = GPTConfig.tiny(layers=1, embed=16, length=8, heads=2)
mesh = hfjax.make_mesh(devices=jax.devices()[:1], data=1)
layout = hfjax.layout(lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-3), mesh, hfjax.DDP)
step = hfjax.train_step(layout, next_token_loss)
state, metrics = step(hfjax.init(layout), {"tokens": np.zeros((2, 9), np.int32)})
step.check(state)
print("trained")

for code in ("from hfjax.data import Loader", "from hfjax.trainer import train"):
    try:
        exec(code)
    except ModuleNotFoundError as missing:
        print(missing)
from hfjax.__main__ import main
sys.exit(main(["train"]))
"""


def test_a_model_trains_without_grain_tyro_tokenizers_and_pyarrow_and_what_needs_them_says_so():
    """One process in which they are not installed; last comes a command."""
    given = [sys.executable, "-W", "ignore", "-c", BARE + TRAINS]
    done = subprocess.run(given, cwd=ROOT, capture_output=True, text=True, timeout=300)
    says = (
        ", which is not installed: pip install {0}, or activate the environment that has it "
        "(source .venv/bin/activate)"
    )
    absent = says.format("grain")
    assert done.stdout.splitlines() == [
        "trained",
        f"hfjax.data.Loader needs the package grain{absent}",
        f"hfjax.trainer.train needs the package grain{absent}",
    ], done.stderr
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"hfjax train needs the package tyro{says.format('tyro')}"]
