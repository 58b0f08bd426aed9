"""Write a pipeline schedule in ten lines, look at it, and train with it on 4 fake CPU devices.

python examples/own_schedule.py
"""

import optax

import hfjax
from hfjax.data import Loader, standard_library
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss

hfjax.simulate_devices(4)  # unless there are 4 GPUs


def early_backward(stages: int, microbatches: int) -> str:
    """One line per stage: forwards until the first backward can come, then one of each."""
    lines = []
    for stage in range(stages):
        ahead = min(stages - stage, microbatches)
        line = [f"{stage}F{m}" for m in range(ahead)]
        for m in range(microbatches):
            line += [f"{stage}B{m}"]
            line += [f"{stage}F{m + ahead}"] if m + ahead < microbatches else []
        lines.append(" ".join(line))
    return "\n".join(lines)


def main() -> None:
    schedule = hfjax.Schedule.from_text(early_backward(stages=4, microbatches=8))
    print(schedule.table(4))
    init = lambda rngs: GPT(GPTConfig.tiny(), rngs=rngs)
    layout = hfjax.layout(init, optax.adamw(1e-3), hfjax.make_mesh(pipe=4), hfjax.PIPE)
    step = hfjax.train_step(layout, next_token_loss, schedule=schedule)
    state = hfjax.init(layout, seed=0, schedule=schedule)
    data = Loader(standard_library() / "train", batch_size=16, seq_len=64)
    for number, batch in zip(range(20), data, strict=False):
        state, metrics = step(state, batch)
        if number % 5 == 4:
            print(f"step {number + 1}: loss {metrics['loss']:.3f}")
    step.check(state)


if __name__ == "__main__":
    main()
