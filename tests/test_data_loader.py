"""The same global batches on 1, 2 and 4 processes, exact resume, and what a loader refuses."""

import json
import subprocess
import sys
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest

from hfjax.data import Loader, TokenSet, share
from tests.token_sets import numbered, targets

SIZES = [5, 40, 2, 90, 13, 60, 31, 22, 1, 50]  # 314 tokens: 39 rows of 8
PACKINGS = pytest.mark.parametrize("packing", ["stream", "documents"])


@pytest.fixture(name="data")
def fixture_data(tmp_path) -> TokenSet:
    return numbered(tmp_path / "data", SIZES)


# The first tokens of the first rows of `data` with seed 7, as a stream and packed.
ORDER = [24, 64, 288, 176, 128, 32, 240, 40]
PACKED_ORDER = [21, 55, 288, 158, 119, 29, 226, 37]


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all((one[k] == other[k]).all() for k in one)


def joined(batches) -> dict:
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


@PACKINGS
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_together_give_the_same_global_batches_for_three_epochs(data, packing, processes):
    options = {"batch_size": 8, "seq_len": 8, "epochs": 3, "packing": packing, "seed": 5}
    whole = Loader(data, **options)
    assert whole.examples_per_epoch % 8, "the epochs must be uneven for this to say something"
    parts = [
        Loader(data, local_examples=share(8, p, processes), **options) for p in range(processes)
    ]
    steps = 0
    for batch, *shares in zip(whole, *parts, strict=True):
        assert same(batch, joined(shares))
        steps += 1
    assert steps == len(whole) == 3 * whole.examples_per_epoch // 8


def test_a_process_gives_just_the_rows_that_it_is_asked_for(data):
    whole, some = Loader(data, 6, 8), Loader(data, 6, 8, local_examples=[4, 0, 3])
    np.testing.assert_array_equal(whole.at(7)["tokens"][[4, 0, 3]], some.at(7)["tokens"])


def test_each_target_comes_once_in_an_epoch_and_epochs_are_shuffled_apart(data):
    loader = Loader(
        data, batch_size=13, seq_len=8, seed=1, epochs=3
    )  # 39 rows: three batches an epoch
    batches = list(loader)
    epochs = [np.concatenate([targets(b) for b in batches[i : i + 3]]) for i in (0, 3, 6)]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(1, 313))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert loader.dropped == 1


def test_another_seed_is_another_order_and_the_same_seed_the_same(data):
    orders = [Loader(data, 39, 8, seed=seed).at(0)["tokens"][:, 0].tolist() for seed in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(0, 312, 8))
    unshuffled = Loader(data, 39, 8, shuffle=False).at(0)["tokens"][:, 0]
    assert unshuffled.tolist() == list(range(0, 312, 8))


def test_neighbouring_seeds_do_not_share_epochs(data):
    """Grain seeds epoch e with seed + e: without hashing, seed 1 would begin with seed 0's next."""
    second = joined([Loader(data, 13, 8, seed=0).at(i) for i in (3, 4, 5)])
    assert not same(second, joined([Loader(data, 13, 8, seed=1).at(i) for i in (0, 1, 2)]))


def test_the_order_is_that_of_every_version_and_machine(data):
    """Numbers written down: a change here breaks the resume of every run that is under way."""
    order = lambda **more: Loader(data, 8, 8, seed=7, **more).at(0)["tokens"][:, 0].tolist()
    assert order() == ORDER
    assert order(packing="documents") == PACKED_ORDER


RESUMED = [  # each packing, with and without threads
    ("stream", 0),
    ("documents", 2),
    pytest.param("stream", 2, marks=pytest.mark.slow),
    pytest.param("documents", 0, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("packing", "threads"), RESUMED)
def test_resume_is_exact_at_every_position(data, packing, threads):
    options = {"seq_len": 8, "epochs": 2, "packing": packing, "threads": threads}
    through = Loader(data, 4, **options)
    batches, states = [], [through.state()]
    for batch in through:
        batches.append(batch)
        states.append(json.loads(json.dumps(through.state())))
    for done, state in enumerate(states):
        resumed = Loader(data, 4, **options)
        resumed.restore(state)
        rest = list(islice(resumed, 3))
        assert len(rest) == min(3, len(batches) - done)
        assert all(map(same, rest, batches[done : done + 3]))


def test_resume_is_exact_on_other_processes_and_with_other_batches(data):
    through = Loader(data, 1, 8)
    stream = np.concatenate([next(through)["tokens"] for _ in range(90)])
    began = Loader(data, 6, 8)
    for _ in range(5):
        next(began)
    state = began.state()
    assert state["rows"] == 30
    for rows, processes in [(6, 1), (6, 2), (4, 4), (10, 2), (7, 1)]:
        parts = [
            Loader(data, rows, 8, local_examples=share(rows, p, processes))
            for p in range(processes)
        ]
        for part in parts:
            part.restore(state)
        for step in range(4):
            found = joined([next(part) for part in parts])["tokens"]
            at = 30 + step * rows
            np.testing.assert_array_equal(found, stream[at : at + rows])
            assert all(part.state() == state | {"rows": at + rows} for part in parts)


def test_batches_that_wait_are_not_counted_as_consumed(data):
    loader = Loader(data, 4, 8, threads=2, prefetch=8)
    next(loader)
    assert loader.state()["rows"] == 4
    assert loader.epoch == 4 / 39


def test_a_loader_tells_what_it_packs_and_drops(data):
    stream, packed = Loader(data, 4, 8), Loader(data, 4, 8, packing="documents")
    assert (stream.examples_per_epoch, stream.dropped, stream.density) == (39, 1, 1.0)
    assert (packed.examples_per_epoch, packed.dropped) == (39, 1)
    whole = Loader(data, 39, 8, packing="documents").at(0)
    assert (whole["documents"] > 0).sum() == 347
    assert round(packed.density * 39 * 9, 6) == 347


def test_a_batch_at_random_is_that_of_the_iteration(data):
    loader = Loader(data, 5, 8, epochs=2, documents=True)
    assert all(same(batch, loader.at(i)) for i, batch in enumerate(loader))
    assert next(loader, None) is None
    assert same(next(loader.rewind()), loader.at(0))
    with pytest.raises(ValueError, match=r"batch 4\.0: there are 15, from 0 on"):
        loader.at(4.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="batch 15: there are 15, from 0 on"):
        loader.at(15)


RUN = """
import zlib
from itertools import islice
from hfjax.data import Loader
for packing in ("stream", "documents"):
    loader = Loader(place, 8, 8, packing=packing, threads=threads)
    print(zlib.crc32(b"".join(b[k].tobytes() for b in islice(loader, 20) for k in sorted(b))))
"""


@pytest.mark.slow
def test_two_runs_give_the_same_bits(data, capsys):
    """Here without threads, in another process with three."""
    place = f"place, threads = {str(data.directory)!r}, "
    there = [sys.executable, "-c", f"{place}3\n{RUN}"]
    done = subprocess.run(there, capture_output=True, check=True, text=True)
    exec(f"{place}0\n{RUN}", {})
    here = capsys.readouterr().out
    assert len(here.split()) == 2
    assert done.stdout == here


@PACKINGS
def test_evaluation_goes_over_everything_once(data, packing):
    options = {"shuffle": False, "epochs": 1, "pad_last": True, "packing": packing}
    loader = Loader(data, 16, 8, **options)
    batches = list(loader)
    assert len(batches) == len(loader) == -(-loader.examples_per_epoch // 16)
    assert {batch["tokens"].shape for batch in batches} == {(16, 9)}
    assert all("mask" in batch for batch in batches)
    found = Counter(np.concatenate([targets(batch) for batch in batches]).tolist())
    firsts = set(np.asarray(data.documents[:-1]).tolist()) if packing == "documents" else {0}
    dropped = {313} if packing == "stream" else set()
    assert found == Counter(set(range(314)) - firsts - dropped)
    assert all(map(same, loader.rewind(), batches))


def test_a_process_whose_rows_are_all_padding_gives_zeros(data):
    last = Loader(data, 32, 8, shuffle=False, epochs=1, pad_last=True, local_examples=[30, 31]).at(
        1
    )
    assert (last["mask"].shape, last["mask"].sum(), last["tokens"].sum()) == ((2, 8), 0, 0)


def test_a_batch_larger_than_the_data_is_padded_or_refused(data):
    small = Loader(data, 64, 8, epochs=1, pad_last=True)
    assert (len(small), next(small)["mask"].sum()) == (1, 312)
    with pytest.raises(ValueError, match="batch of 64 examples: the data has 39 examples of 8 tok"):
        Loader(data, 64, 8)


def test_a_mixture_keeps_its_weights_and_goes_through_each_set(data, tmp_path):
    other = numbered(tmp_path / "other", [100], first=1000)
    mixture = Loader([data, other], batch_size=10, seq_len=8, weights=[3, 1])
    tokens = np.concatenate([mixture.at(i)["tokens"] for i in range(20)])
    of_other = tokens[:, 0] >= 1000
    assert of_other.sum() == 50
    assert set(tokens[of_other][:12, 0]) == set(range(1000, 1096, 8))  # its first epoch
    assert set(tokens[~of_other][:39, 0]) == set(range(0, 312, 8))


def test_the_sets_of_a_mixture_are_shuffled_apart(data):
    tokens = Loader([data, data], batch_size=78, seq_len=8).at(0)["tokens"]
    assert tokens[::2, 0].tolist() != tokens[1::2, 0].tolist()


def test_a_mixture_resumes_exactly_and_splits_among_processes(data, tmp_path):
    sets = [data, numbered(tmp_path / "other", [100], first=1000)]
    whole = Loader(sets, 6, 8, weights=[0.7, 0.3])
    state = [(next(whole), whole.state()) for _ in range(15)][9][1]
    parts = [
        Loader(sets, 6, 8, weights=[0.7, 0.3], local_examples=share(6, p, 2)) for p in range(2)
    ]
    for part in parts:
        part.restore(state)
    for step in range(10, 15):
        assert same(whole.at(step), joined([next(part) for part in parts]))


DIFFERENCES = {
    "seed": {"seed": 1},
    "length": {"seq_len": 9},
    "packing": {"packing": "documents"},
    "shuffle": {"shuffle": False},
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_state_of_another_stream_is_refused_by_name(data, name):
    given: dict[str, Any] = {"batch_size": 4, "seq_len": 8}
    state = Loader(data, **given).state()
    other = Loader(data, **given | DIFFERENCES[name])
    with pytest.raises(ValueError, match=f"of another stream of examples: its {name} is .*, here"):
        other.restore(state)


def test_a_state_of_other_data_or_another_shuffle_is_refused(data, tmp_path):
    loader = Loader(data, 4, 8)
    changed = numbered(tmp_path / "changed", SIZES[::-1])
    with pytest.raises(ValueError, match=r"its data is \[\{'tokens': 314, 'rows': 39, .* here"):
        Loader(changed, 4, 8).restore(loader.state())
    with pytest.raises(ValueError, match="its order is 1, here it is"):
        loader.restore(loader.state() | {"order": 1})
    with pytest.raises(ValueError, match=r"at example 400, the data ends at 39 \(epochs=1\)"):
        Loader(data, 4, 8, epochs=1).restore(loader.state() | {"rows": 400})


def test_a_loader_goes_on_after_a_fault_at_the_same_batch(data, monkeypatch):
    loader = Loader(data, 4, 8)
    next(loader)
    expected = Loader(data, 4, 8).at(1)
    with monkeypatch.context() as patched:
        broken = Loader(data, 4, 8)
        patched.setattr(data, "tokens", data.tokens.astype(np.int64) + 1000)
        broken.restore(loader.state())
        with pytest.raises(ValueError, match="the vocabulary has 314"):
            next(broken)
    assert same(next(broken), expected)


def test_a_model_that_is_too_small_for_the_data_is_refused(data):
    loader = Loader(data, 4, 8)
    loader.check(vocab=314, seq_len=8)
    with pytest.raises(ValueError, match="data has a vocabulary of 314, the model one of 313"):
        loader.check(vocab=313)
    with pytest.raises(ValueError, match="sequences of 8 tokens, the model has 7 positions"):
        loader.check(seq_len=7)


REFUSED = {
    "batch_size=0: a whole number from 1": {"batch_size": 0},
    "batch_size=2.0: a whole number from 1": {"batch_size": 2.0},
    "batch_size=True: a whole number from 1": {"batch_size": True},
    "epochs=True: a whole number from 1 on, or None": {"epochs": True},
    "shuffle=1: True or False": {"shuffle": 1},
    "seq_len=0: a whole number": {"seq_len": 0},
    "seed=-1: a whole number from 0": {"seed": -1},
    "prefetch=1: a whole number from 2": {"prefetch": 1},
    r"local_examples=\[4\]: the numbers .* from 0 to 3": {"local_examples": [4]},
    r"local_examples=\[\]: the numbers": {"local_examples": []},
    r"local_examples=\[0.5\]: the numbers": {"local_examples": [0.5]},
    "packing='rows': one of stream, documents": {"packing": "rows"},
    "epochs=0: a whole number from 1 on, or None": {"epochs": 0},
    "pad_last=True: without epochs": {"pad_last": True},
    r"weights=\[1, 2\] for 1 data sets": {"weights": [1, 2]},
    r"weights=\[0\] for 1 data sets: give one for each, above 0": {"weights": [0]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_means_nothing_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        Loader(data, **{"batch_size": 4, "seq_len": 8} | REFUSED[message])


def test_a_mixture_of_nothing_or_with_an_end_is_refused(data):
    with pytest.raises(ValueError, match="no data set given"):
        Loader([], 4, 8)
    with pytest.raises(ValueError, match="epochs=1 of 2 data sets: a mixture has no end"):
        Loader([data, data], 4, 8, epochs=1)


def test_rows_that_do_not_divide_among_processes_are_refused():
    with pytest.raises(
        ValueError, match="6 examples do not divide among 4 processes: give 8 examples"
    ):
        share(6, 0, 4)


def test_without_epochs_there_is_no_length(data):
    with pytest.raises(TypeError, match="without epochs has no end"):
        len(Loader(data, 4, 8))
