"""A run that trains a small model and saves every step, in a process of its own: to be killed."""

import sys
from pathlib import Path

import jax


def main(directory, losses, steps, devices=2):
    import hfjax
    from hfjax.models.gpt import next_token_loss
    from tests.small_gpt import mlp_layout

    layout = mlp_layout(hfjax.FSDP, {"fsdp": devices}, layers=1, dropout=0.1)
    step = hfjax.train_step(layout, next_token_loss)
    print("open", flush=True)
    with hfjax.CheckpointManager(
        directory, layout, keep=hfjax.RetentionPolicy(latest=2)
    ) as checkpoints:
        state, first = hfjax.init(layout), 0
        if checkpoints.latest() is not None:
            restored = checkpoints.restore()
            state, first = restored.state, restored.data["next"]
        for number in range(first, steps):
            state, metrics = step(state, batch(number))
            with open(losses, "a") as file:
                file.write(f"{number} {float(metrics['loss']).hex()}\n")
            checkpoints.save(state, data={"next": number + 1})
    print("done", flush=True)


def batch(number):
    import numpy as np

    rng = np.random.default_rng(number)
    return {"tokens": rng.integers(0, 64, (8, 25)).astype(np.int32)}


if __name__ == "__main__":
    directory, losses, steps, cache = sys.argv[1:5]
    sys.path.insert(0, str(Path(__file__).parent.parent))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    main(directory, losses, int(steps))
