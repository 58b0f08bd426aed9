"""Row = f(index): every token is a target once; masks never cross a document."""

from collections import Counter

import numpy as np
import pytest

from hfjax.data.examples import DocumentExamples, StreamExamples, best_fit, chunk_documents, pack
from tests.token_sets import numbered

SIZES = [1, 2, 9, 30, 4, 8, 1, 17, 3, 25]  # 100 tokens


def test_each_token_of_the_stream_is_a_target_once_but_the_first_and_the_rest(tmp_path):
    rows = StreamExamples(numbered(tmp_path / "a", SIZES), length=8)
    assert (len(rows), rows.dropped) == (12, 3)
    found = np.stack([rows[i]["tokens"] for i in range(len(rows))])
    assert (found.shape, found.dtype) == ((12, 9), np.int32)
    np.testing.assert_array_equal(found[:, 1:].ravel(), np.arange(1, 97))
    np.testing.assert_array_equal(found[:, :-1].ravel(), np.arange(96))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 50, 99])
def test_a_stream_can_tell_which_tokens_are_of_one_document(tmp_path, length):
    data = numbered(tmp_path / "a", SIZES)
    rows = StreamExamples(data, length, documents=True)
    document = np.searchsorted(data.documents, np.arange(100), "right")
    for i in range(len(rows)):
        row, at = rows[i], np.arange(i * length, (i + 1) * length + 1)
        np.testing.assert_array_equal(row["documents"], document[at] - document[at[0]] + 1)
        same = document[at[1:]] == document[at[:-1]]
        np.testing.assert_array_equal(row["mask"], same.astype(np.float32))
        assert (row["documents"].dtype, row["mask"].dtype) == (np.int32, np.float32)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 29, 64])
def test_packed_documents_lose_and_double_no_target(tmp_path, length):
    data = numbered(tmp_path / "a", SIZES)
    rows = DocumentExamples(data, length)
    found = Counter()
    for i in range(len(rows)):
        tokens, mask = rows[i]["tokens"], rows[i]["mask"]
        np.testing.assert_array_equal(tokens[1:][mask > 0], tokens[:-1][mask > 0] + 1)
        found.update(tokens[1:][mask > 0].tolist())
    firsts = set(np.asarray(data.documents[:-1]).tolist())
    assert found == Counter(set(range(100)) - firsts)
    assert rows.dropped == 2  # the two documents of one token


def test_a_packed_row_numbers_its_documents_and_pads_with_zeros(tmp_path):
    rows = DocumentExamples(numbered(tmp_path / "a", [3, 2, 9]), length=7)
    found = [{name: x.tolist() for name, x in rows[i].items()} for i in range(len(rows))]
    assert found == [
        {
            "tokens": [0, 1, 2, 3, 4, 12, 13, 0],
            "documents": [1, 1, 1, 2, 2, 3, 3, 0],
            "mask": [1, 1, 0, 1, 0, 1, 0],
        },
        {
            "tokens": [5, 6, 7, 8, 9, 10, 11, 12],
            "documents": [1] * 8,
            "mask": [1] * 7,
        },
    ]
    assert rows.density == 15 / 16


def test_a_long_document_is_cut_at_a_shared_token():
    starts, sizes = chunk_documents(np.array([0, 10, 11, 15]), length=4)
    assert starts.tolist() == [0, 4, 8, 11]
    assert sizes.tolist() == [5, 5, 2, 4]


def first_principles(sizes: np.ndarray, capacity: int) -> list[int]:
    """Return the room left in each row by best fit decreasing, a piece at a time."""
    rooms: list[int] = []
    for size in sorted(sizes.tolist(), reverse=True):
        fits = [room for room in rooms if room >= size]
        if fits:
            rooms.remove(min(fits))
        rooms.append((min(fits) if fits else capacity) - size)
    return sorted(rooms)


def test_packing_in_groups_is_best_fit_decreasing():
    random = np.random.default_rng(0)
    for _ in range(200):
        capacity = int(random.integers(2, 30))
        sizes = random.integers(1, capacity + 1, size=random.integers(1, 80))
        used = np.bincount(best_fit(sizes, capacity), weights=sizes).astype(int)
        assert sorted((capacity - used).tolist()) == first_principles(sizes, capacity)


def test_packing_is_dense_and_follows_the_documents():
    sizes = np.maximum(2, np.random.default_rng(0).lognormal(5, 1.2, 20_000)).astype(int)
    starts, sizes = chunk_documents(np.append(0, np.cumsum(sizes)), length=1024)
    packed = pack(starts, sizes, 1025)
    assert packed.sizes.sum() / (len(packed) * 1025) > 0.999
    assert sorted(packed.starts.tolist()) == starts.tolist()
    firsts = packed.starts[packed.offsets[:-1]]
    assert (np.diff(firsts) > 0).all()
    again = pack(starts, sizes, 1025)
    np.testing.assert_array_equal(packed.starts, again.starts)


def test_too_few_tokens_for_a_row_are_refused(tmp_path):
    data = numbered(tmp_path / "a", [8])
    assert len(StreamExamples(data, 7)) == 1
    with pytest.raises(ValueError, match=r"a has 8 tokens: a sequence of 8 needs 9\. Shorten"):
        StreamExamples(data, 8)
    with pytest.raises(ValueError, match="none of its 3 documents has two tokens"):
        DocumentExamples(numbered(tmp_path / "b", [1, 1, 1]), 8)
    with pytest.raises(ValueError, match="sequences of 0 tokens: at least 1"):
        StreamExamples(data, 0)
