"""torch's 1F1B of the layers of idle_slots.py in processes: prints its processor time of a step.

python -m benchmarks.torch_1f1b STAGES
"""

# pyright: reportMissingImports=false
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

LAYERS, WIDTH, ROWS, MICROBATCHES, ROUNDS = 8, 512, 512, 8, 4


class Layer(nn.Module):
    """An MLP beside its input."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def work(rank: int, stages: int, times: mp.SimpleQueue) -> None:
    """Train as one stage; tell how long each step kept this process busy."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["TORCH_1F1B_PORT"]}
    dist.init_process_group("gloo", rank=rank, world_size=stages)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS // stages)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    square = lambda y, _: torch.square(y).mean()
    stage = PipelineStage(model, rank, stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=square)
    x = torch.randn(MICROBATCHES * ROWS, WIDTH)

    def step() -> float:
        start = time.process_time()
        optimizer.zero_grad()
        if stages == 1:
            for part in x.chunk(MICROBATCHES):
                (square(model(part), None) / MICROBATCHES).backward()
        else:
            last = {"target": x} if rank == stages - 1 else {}
            schedule.step(*([x] if rank == 0 else []), **last)
        optimizer.step()
        return time.process_time() - start

    step()
    times.put([step() for _ in range(ROUNDS)])
    dist.barrier()
    dist.destroy_process_group()


def main(stages: int) -> None:
    os.environ.setdefault("TORCH_1F1B_PORT", str(20000 + os.getpid() % 20000))
    context = mp.get_context("spawn")
    times = context.SimpleQueue()
    workers = [context.Process(target=work, args=(r, stages, times)) for r in range(stages)]
    for worker in workers:
        worker.start()
    steps = [times.get() for _ in workers]
    for worker in workers:
        worker.join()
    print(min(map(sum, zip(*steps, strict=True))))


if __name__ == "__main__":
    main(int(sys.argv[1]))
