"""Any Grain data set: the same batches on any number of processes, exact resume, what is refused.

Example i of `numbered` is made of i alone, so none is mistaken.
"""

import json
from itertools import islice
from typing import Any, cast

import grain
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import hfjax
from hfjax.data import from_grain, share


def example(i: int) -> dict[str, Any]:
    """A dictionary of arrays of several ranks and dtypes, one of them in another dictionary."""
    return {
        "index": i,
        "inputs": {"tokens": np.arange(i, i + 3, dtype=np.int32), "scale": np.float16(i)},
        "image": np.full((2, 2, 1), i, np.uint8),
        "late": i % 2 == 1,
        "half": np.array([i], ml_dtypes.bfloat16),
    }


def numbered(count: int = 39) -> grain.MapDataset:
    return grain.MapDataset.range(count).map(example)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())


def joined(parts: list) -> Any:
    if isinstance(parts[0], dict):
        return {k: joined([part[k] for part in parts]) for k in parts[0]}
    return np.concatenate(parts)


def indices(batches: Any) -> list[int]:
    return [int(i) for batch in batches for i in batch["index"]]


def test_a_batch_stacks_arrays_of_any_rank_and_dtype():
    batch = from_grain(numbered(), batch_size=4).at(1)
    assert batch["index"].tolist() == [4, 5, 6, 7]
    assert batch["index"].dtype == np.asarray(0).dtype
    assert batch["inputs"]["tokens"].tolist() == [[i, i + 1, i + 2] for i in range(4, 8)]
    assert (batch["inputs"]["scale"].dtype, batch["inputs"]["scale"].shape) == (np.float16, (4,))
    assert (batch["image"].dtype, batch["image"].shape) == (np.uint8, (4, 2, 2, 1))
    assert batch["late"].tolist() == [False, True, False, True]
    assert batch["half"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_together_give_the_same_global_batches_for_three_epochs(processes):
    data = numbered().shuffle(seed=5)
    options: dict[str, Any] = {"batch_size": 8, "epochs": 3}
    whole = from_grain(data, **options)
    parts = [
        from_grain(data, local_examples=share(8, p, processes), threads=p % 3, **options)
        for p in range(processes)
    ]
    steps = 0
    for batch, *shares in zip(whole, *parts, strict=True):
        assert same(batch, joined(shares))
        steps += 1
    assert steps == len(whole) == 3 * 39 // 8, "39 examples: no epoch divides"


def test_grain_shuffles_and_draws_anew_in_each_epoch():
    drawn = lambda x, rng: x | {"noise": rng.random()}
    data = numbered(12).seed(3).random_map(drawn).shuffle()
    batches = list(from_grain(data, batch_size=4, epochs=3))
    epochs = [indices(batches[i : i + 3]) for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert len({float(x) for batch in batches for x in batch["noise"]}) == 36


def test_a_data_set_that_repeats_without_end_is_one_with_endless_epochs():
    data = numbered(5).shuffle(seed=1)
    repeated, endless = from_grain(data.repeat(), batch_size=4), from_grain(data, batch_size=4)
    assert indices(islice(repeated, 6)) == indices(islice(endless, 6))
    repeated.restore(json.loads(json.dumps(repeated.state())))
    assert indices(islice(repeated, 1)) == indices([endless.at(6)])
    assert from_grain(data, batch_size=2).examples_per_epoch == 5


@pytest.mark.parametrize("threads", [0, 2])
def test_resume_is_exact_at_every_position(threads):
    make = lambda: from_grain(numbered(11).shuffle(seed=2), 4, epochs=2, threads=threads)
    through = make()
    batches, states = [], [through.state()]
    for batch in through:
        batches.append(batch)
        states.append(json.loads(json.dumps(through.state())))
    assert len(batches) == 5
    for done, state in enumerate(states):
        resumed = make()
        resumed.restore(state)
        rest = list(resumed)
        assert len(rest) == 5 - done
        assert all(map(same, rest, batches[done:]))


def test_resume_is_exact_on_other_processes_and_with_other_batches():
    data = numbered(11).shuffle(seed=2)
    stream = indices(islice(from_grain(data, 1), 60))
    began = from_grain(data, 6)
    indices(islice(began, 3))
    for batch_size, processes in [(6, 2), (4, 4), (7, 1)]:
        parts = [
            from_grain(data, batch_size, local_examples=share(batch_size, p, processes))
            for p in range(processes)
        ]
        for part in parts:
            part.restore(began.state())
        for step in range(4):
            at = 18 + step * batch_size
            assert indices([joined([next(part) for part in parts])]) == stream[at : at + batch_size]


def test_an_evaluation_reads_each_example_once_and_pads_with_zeros():
    loader = from_grain(numbered(5), batch_size=4, epochs=1, pad_last=True)
    first, last = loader
    assert first["mask"].tolist() == [1, 1, 1, 1]
    assert last["mask"].tolist() == [1, 0, 0, 0]
    assert last["mask"].dtype == np.float32
    assert last["inputs"]["tokens"].tolist() == [[4, 5, 6], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert "mask" not in from_grain(numbered(5), batch_size=4).at(0)
    masked = numbered(5).map(lambda x: x | {"mask": np.array([True, False])})
    last = from_grain(masked, batch_size=4, epochs=1, pad_last=True).at(1)
    assert last["mask"].tolist() == [[True, False], *([[False, False]] * 3)]
    assert len(from_grain(numbered(3), batch_size=8, epochs=1, pad_last=True)) == 1


def other_content(x: dict) -> dict:
    return x | {"image": x["image"] + 1}


@pytest.mark.parametrize(
    ("other", "name", "differs"),
    [
        (numbered(40), "", "'examples': 40"),
        (numbered().map(lambda x: x | {"more": 1}), "", "'more'"),
        (numbered().map(other_content), "", "'crc32'"),
        (numbered().shuffle(seed=1), "", "'crc32'"),
        (numbered(), "second", "'name': 'second'"),
    ],
)
def test_a_state_of_another_data_set_is_refused(other, name, differs):
    state, loader = from_grain(numbered(), 4).state(), from_grain(other, 4, name=name)
    with pytest.raises(ValueError, match="this state is of another stream of examples: its data"):
        loader.restore(state)
    assert differs in str(loader.identity["data"])


def test_the_last_bits_of_floats_do_not_make_another_data_set():
    """They depend on the machine that computes them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 50)).astype(np.float32)
    of = lambda x: from_grain(grain.MapDataset.source(list(x)).map(lambda y: {"x": y}), 4).identity
    assert of(x) == of(np.nextafter(x, np.float32(9)))
    assert of(x) != of(x[::-1])


# -- what is refused ----------------------------------------------------------------------


class FillsGaps(grain.MapDataset):
    """A user's own class, which fills the gaps of a filter."""

    def __len__(self):
        return len(self._parent)

    def __getitem__(self, index: Any) -> Any:
        return self._parent[index] or example(0)


LIST = [example(0)] * 8
REFUSED: dict[str, tuple[Any, str]] = {
    "a list": (LIST, r"found a list\. It has examples by number.*MapDataset\.source\(data\)"),
    "an iterator": (iter(LIST), r"found a list_iterator\. An iterator can neither go on at a"),
    "a generator": ((x for x in LIST), r"found a generator\. An iterator"),
    "in order": (numbered().to_iter_dataset(), r"IterDataset\. It is read in order only"),
    "Grain's loader": (
        grain.load(cast(Any, LIST), num_epochs=1),
        r"found a DataLoader\. hfjax batches, shares and resumes itself",
    ),
    "nothing": (None, r"found None\. Return it: is a `return` missing\?"),
    "several": ({"train": numbered()}, r"found a dict\. Give one data set"),
    "a function": (numbered, r"found a function\. Call it"),
    "a number": (3, r"a grain\.MapDataset is expected, found a int\.$"),
    "empty": (grain.MapDataset.source([]), r"the data set has no example, at least one"),
    "batched": (numbered().batch(4), r"batched already, by \.batch\(\)\. Leave that out"),
    "a filter": (
        numbered().filter(bool),
        r"has a \.filter\(\), which leaves gaps\. Which examples",
    ),
    "a filter below": (
        grain.MapDataset.concatenate([numbered().filter(bool).map(dict), numbered()]),
        r"has a \.filter\(\)",
    ),
    "a gap": (
        grain.MapDataset.source([example(0), None]),
        r"example 1 is None: it is missing\. Which examples a filter keeps",
    ),
    "unlike shapes": (
        numbered(20).map(lambda x: {"tokens": np.zeros(32 + (x["index"] == 17), np.int32)}),
        r"example 17: 'tokens' is int32\[33\], that of example 0 is int32\[32\]\. Pad or crop",
    ),
    "unlike nested shapes": (
        numbered(4).map(lambda x: {"a": {"b": np.zeros(x["index"] // 3)}}),
        r"example 3: 'a/b' is float64\[1\], that of example 0 is float64\[0\]",
    ),
    "unlike dtypes": (
        numbered(4).map(lambda x: {"x": np.zeros(2, np.float32 if x["index"] < 2 else float)}),
        r"example 2: 'x' is float64\[2\], that of example 0 is float32\[2\]\. Give both the same "
        r"dtype: x\.astype\(np\.float32\)",
    ),
    "a key less": (
        numbered(4).map(lambda x: {"a": 1} if x["index"] == 2 else {"a": 1, "b": 2}),
        r"example 2 has no 'b', example 0 has\. Give all examples the same keys: a, b",
    ),
    "a key more": (
        numbered(4).map(lambda x: {"a": 1, "b": 2} if x["index"] == 2 else {"a": 1}),
        r"example 2 has 'b', example 0 has not",
    ),
    "no dictionary": (
        grain.MapDataset.range(4),
        r"example 0 is a int: a dictionary of arrays is expected\. Name what it holds",
    ),
    "an empty dictionary": (numbered().map(lambda x: {}), r"example 0 is an empty dictionary"),
    "an empty one in it": (
        numbered().map(lambda x: {"a": {}}),
        r"example 0: 'a' is an empty dictionary",
    ),
    "a key that is a number": (
        numbered().map(lambda x: {0: 1}),
        r"example 0 has the key 0: keys are texts",
    ),
    "text": (
        numbered().map(lambda x: {"a": {"text": "hello"}}),
        r"example 0: 'a/text' is a str: an array of numbers is expected\. Tokenize text",
    ),
    "an array of text": (
        numbered().map(lambda x: {"text": np.array(["a"])}),
        r"example 0: 'text' is a ndarray: an array of numbers is expected\. Its dtype is <U1",
    ),
    "numbers in a list": (
        numbered().map(lambda x: {"x": [1, 2]}),
        r"'x' is a list: an array of numbers is expected\. Convert it: np\.asarray",
    ),
    "chance": (
        numbered().map(lambda x: {"index": 0, "x": np.random.rand()}),
        r"example 0: 'x' differs when it is read again\..*random_map",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_data_set_of_like_dictionaries_is_refused_by_index_and_key(name):
    data, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        list(from_grain(data, batch_size=2, epochs=1))


def test_a_class_of_ones_own_may_fill_the_gaps_of_a_filter():
    data = FillsGaps(numbered(4).filter(lambda x: x["index"] != 2))
    assert indices(from_grain(data, 2, epochs=1)) == [0, 1, 0, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch_size": 12},
            r"a batch of 12 examples: the data set has 11 of half bfloat16\[1\], ",
        ),
        ({"batch_size": 0}, r"batch_size=0: a whole number from 1 on"),
        ({"epochs": 0}, r"epochs=0: a whole number from 1 on, or None"),
        ({"pad_last": True}, r"pad_last=True: without epochs there is no last batch"),
        ({"local_examples": [4]}, r"local_examples=\[4\]: the numbers of this process's examples"),
        ({"threads": 3, "prefetch": 2}, r"prefetch=2: a whole number from 3 on"),
        ({"name": 3}, r"name=3: a text is expected"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        from_grain(numbered(11), **({"batch_size": 4} | options))


@pytest.mark.parametrize("options", [{"epochs": 2}, {"pad_last": True}])
def test_an_end_of_what_has_none_is_refused(options):
    (option, value), *_ = options.items()
    with pytest.raises(ValueError, match=rf"{option}={value}: this data set has no end"):
        from_grain(numbered().repeat(), 4, **options)


def test_an_error_of_the_data_set_says_for_which_example():
    broken = lambda x: x if x["index"] < 6 else x["missing"]
    with pytest.raises(KeyError, match="missing") as raised:
        list(from_grain(numbered(8).map(broken), 2, epochs=1))
    assert "The data set raises this for its example 6." in raised.value.__notes__
    source = [{"x": 0}, {"x": 1}]

    class Ends(FillsGaps):
        def __getitem__(self, index: Any) -> Any:
            return source[index]

    with pytest.raises(IndexError) as raised:
        list(from_grain(Ends(numbered(2)), 2, epochs=2))
    assert "example 2 (of a later epoch: it has 2)." in raised.value.__notes__[0]


# -- in a loop of one's own ---------------------------------------------------------------


def points(i: int) -> dict[str, Any]:
    x = np.random.default_rng(i).normal(size=4).astype(np.float32)
    return {"x": x, "y": x.sum()}


def test_a_loop_of_ones_own_saves_the_position_and_goes_on(tmp_path):
    data = grain.MapDataset.range(40).map(points).shuffle(seed=0)
    mesh = hfjax.make_mesh(fsdp=8)
    layout = hfjax.layout(lambda rngs: {"w": jnp.zeros(4)}, optax.sgd(0.1), mesh, hfjax.FSDP)
    loss = lambda params, batch: ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()
    step = hfjax.train_step(layout, loss)
    local = hfjax.process_batch_slice(layout, 16)
    make = lambda: from_grain(data, 16, local_examples=local)
    loader, state, losses = make(), hfjax.init(layout), []
    for number in range(6):
        if number == 3:
            hfjax.save(tmp_path / "saved", layout, state, data=loader.state())
        state, metrics = step(state, next(loader))
        losses.append(float(metrics["loss"]))
    restored, again = hfjax.restore(tmp_path / "saved", layout), make()
    again.restore(restored.data)
    state, resumed = restored.state, []
    for batch in islice(again, 3):
        state, metrics = step(state, batch)
        resumed.append(float(metrics["loss"]))
    assert resumed == losses[3:]
    assert losses[-1] < losses[0]
