"""torchvision's models under DistributedDataParallel: gloo, one thread a process, and no GPU.

The processes wait for orders and answer with the processor seconds of a step, so that another
program can take turns with them.
"""

# pyright: reportMissingImports=false

import multiprocessing
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        config: The shape, as hfjax has it.
        flat: Its first parameters, by path.
        batch: Images of bytes and labels, of all processes.
        last: Whether channels come last in memory.
        rate: The learning rate of SGD.
        momentum: Of SGD.
    """

    config: Any
    flat: Mapping[str, np.ndarray]
    batch: Mapping[str, np.ndarray]
    last: bool
    rate: float
    momentum: float


class Workers:
    """The processes of a task, one for each part of the batch."""

    def __init__(self, task: Task, count: int):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            part = {name: np.array_split(x, count)[rank] for name, x in task.batch.items()}
            given = (theirs, rank, count, port, replace(task, batch=part))
            self.processes.append(context.Process(target=work, args=given, daemon=True))
            self.processes[-1].start()
            self.pipes.append(ours)

    def step(self) -> tuple[float, float]:
        """Take a step; return the processor seconds of all processes, and the mean loss."""
        for pipe in self.pipes:
            pipe.send(True)
        seconds, losses = zip(*(pipe.recv() for pipe in self.pipes), strict=True)
        return sum(seconds), sum(losses) / len(losses)

    def end(self) -> None:
        """End the processes."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(False)
            process.join()


def work(orders: Connection, rank: int, count: int, port: int, task: Task) -> None:
    """Take a step for each order."""
    import torch
    import torch.distributed as dist

    from benchmarks.torch_vision import MODELS, WithLoss, given_weights

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=count)
    order = torch.channels_last if task.last else torch.contiguous_format
    model = MODELS[type(task.config)](task.config)
    given_weights(model, task.config, task.flat)
    whole: Any = WithLoss(model, task.config).to(memory_format=order)
    program = torch.nn.parallel.DistributedDataParallel(whole.train())
    sgd = torch.optim.SGD(program.parameters(), lr=task.rate, momentum=task.momentum)
    image = torch.tensor(task.batch["image"]).permute(0, 3, 1, 2).contiguous(memory_format=order)
    given = {"image": image, "label": torch.tensor(task.batch["label"], dtype=torch.long)}
    while orders.recv():
        start = time.process_time()
        loss = program(given)
        loss.backward()
        sgd.step()
        sgd.zero_grad(set_to_none=True)
        orders.send((time.process_time() - start, loss.item()))
    dist.destroy_process_group()
