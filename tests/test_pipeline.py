"""Every schedule trains as one device does, alone and beside every other way to split."""

import pytest

from hfjax import DDP, FSDP, PIPE, SEQUENCE, TENSOR, ZERO1, ZERO2, Schedule
from hfjax.models.gpt import next_token_loss
from hfjax.testing import assert_strategies_agree
from tests.small_gpt import gpt, tokens

# name, stages, microbatches, chunks
SCHEDULES = [
    ("gpipe", 4, 8, 1),
    ("1f1b", 4, 8, 1),
    ("1f1b", 4, 2, 1),  # fewer microbatches than stages
    ("1f1b-half", 2, 4, 1),
    ("interleaved", 2, 4, 2),
    ("looped-bfs", 2, 4, 2),
    ("zb", 4, 8, 1),
    ("zb", 2, 4, 2),
    ("zb-h1", 4, 8, 1),
    ("zb-v", 2, 8, 2),
    ("v", 2, 8, 2),
    ("v-zb", 2, 8, 2),
    ("dualpipe-v", 2, 4, 2),
    ("1f1b", 1, 4, 1),
]


@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), SCHEDULES)
def test_a_schedule_equals_one_device(name, stages, microbatches, chunks):
    schedule = Schedule(name, microbatches, chunks)
    case = {name: (PIPE, {"pipe": stages}, {"schedule": schedule})}
    mask = tokens()["tokens"][:, 1:] % 3 > 0
    model = gpt(layers=4, dropout=0.1)
    batch = tokens(mask=mask.astype("float32"))
    assert_strategies_agree(model, next_token_loss, batch, case, steps=2, clip=0.5)


MESHES = {
    "data": (PIPE | DDP, {"pipe": 2, "data": 2}, "1f1b"),
    "ZeRO-1": (PIPE | ZERO1, {"pipe": 2, "data": 2, "fsdp": 2}, "interleaved"),
    "ZeRO-2": (PIPE | ZERO2, {"pipe": 2, "data": 2}, "zb"),
    "ZeRO-3": (PIPE | FSDP, {"pipe": 2, "fsdp": 2}, "1f1b"),
    "tensor": (PIPE | TENSOR, {"pipe": 2, "tensor": 2}, "1f1b"),
    "data and tensor, sequence": (
        PIPE | TENSOR | SEQUENCE,
        {"pipe": 2, "data": 2, "tensor": 2},
        "1f1b",
    ),
    "ZeRO-3 and tensor": (PIPE | FSDP | TENSOR, {"pipe": 2, "fsdp": 2, "tensor": 2}, "zb"),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_pipeline_beside_other_axes_equals_one_device(name):
    strategy, sizes, schedule = MESHES[name]
    fields = {"schedule": Schedule(schedule, 2), "accumulate": 2}
    case = {name: (strategy.edit(replicate_below=0), sizes, fields)}
    assert_strategies_agree(gpt(layers=4), next_token_loss, tokens(), case, steps=2)
