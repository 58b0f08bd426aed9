"""Train a byte-level GPT on Python's own library, on 8 fake CPU devices.

python examples/train_gpt.py            # FSDP and tensor parallelism
python examples/train_gpt.py ZERO1      # or any of hfjax's strategies, or "HSDP|TENSOR"
"""

import sys
from functools import reduce

import optax

import hfjax
from hfjax.data import Loader, standard_library
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss

hfjax.simulate_devices(8)  # unless there are 8 GPUs


def main(names: str = "FSDP|TENSOR") -> None:
    strategy = reduce(lambda a, b: a | b, (getattr(hfjax, name) for name in names.split("|")))
    tensor = 2 if "TENSOR" in names else 1
    mesh = hfjax.make_mesh(data=2, fsdp=-1, tensor=tensor)
    init = lambda rngs: GPT(GPTConfig.tiny(dropout=0.1), rngs=rngs)
    layout = hfjax.layout(init, optax.adamw(1e-3), mesh, strategy)
    print(layout)
    step = hfjax.train_step(
        layout, next_token_loss, gradient_accumulation_steps=2, max_grad_norm=1.0
    )
    evaluate = hfjax.eval_step(layout, next_token_loss)
    state = hfjax.init(layout, seed=0)
    data = Loader(standard_library() / "train", batch_size=16, seq_len=64)
    for number in range(30):
        state, metrics = step(state, next(data))
        if number % 10 == 9:
            print(f"step {number + 1}: loss {metrics['loss']:.3f}, norm {metrics['grad_norm']:.2f}")
    step.check(state)
    print(f"evaluated: {evaluate(state, next(data))['loss']:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
