"""Files of chats: what is read, what is refused, and the examples that a loader makes of them."""

import gzip
import json
from typing import Any, cast

import numpy as np
import pytest

import hfjax
from hfjax.data import Loader, TokenSet
from hfjax.data.chat.build_chats import ChatOptions, build_chats
from hfjax.data.chat.conversations import is_chat_file, read_rows
from hfjax.data.chat.template import Template
from hfjax.data.tokenizer import load_tokenizer
from hfjax.models.loss import next_token_loss
from tests.chats.templates import CHATML
from tests.test_chat_template import CHATS, HELLO, TWICE

TEMPLATE = Template(CHATML, {"eos_token": "<|endoftext|>"}, "chatml.jinja")


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def built(folder, *rows, name="chats.jsonl", **options):
    path = written(folder / name, *rows)
    tokenizer: Any = load_tokenizer(str(CHATS / "tokenizer.json"))
    build_chats(path, folder / "out", tokenizer, TEMPLATE, ChatOptions(**options))
    return TokenSet(folder / "out")


def parts(data):
    """The text of each example, and of what the loss counts of it."""
    decode = lambda ids: data.tokenizer.decode(ids)
    bounds = list(zip(data.documents[:-1].tolist(), data.documents[1:].tolist(), strict=True))
    pairs = [(data.read(a, b), data.read_counted(a, b)) for a, b in bounds]
    return [(decode(ids), decode(ids[mask > 0])) for ids, mask in pairs]


def said(*pairs):
    return [{"role": role, "content": text} for role, text in pairs]


def test_rows_are_read_from_lines_gzip_and_parquet_and_mean_the_same(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": HELLO, "tools": None}, {"messages": TWICE, "tools": []}]
    lines = written(tmp_path / "a.jsonl", *rows)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf\n" + lines.read_bytes()))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    rows_of = lambda name: cast("list[Any]", list(read_rows(tmp_path / name)))
    messages = lambda name: [row.messages for row in rows_of(name)]
    assert messages("a.jsonl") == messages("a.jsonl.gz") == messages("a.parquet")
    assert messages("a.jsonl") == [tuple(HELLO), tuple(TWICE)]
    locations = [row.location for row in read_rows(tmp_path / "a.parquet")]
    assert [text.partition(": ")[2] for text in locations] == ["row 1", "row 2"]


def test_prompts_and_completions_are_texts_or_messages(tmp_path):
    rows = [
        {"prompt": "Hello", "completion": " you<|im_end|>"},
        {"prompt": TWICE[:3], "completion": TWICE[3:]},
    ]
    data = built(tmp_path, *rows)
    assert parts(data) == [
        ("Hello you<|im_end|><|endoftext|>", " you<|im_end|><|endoftext|>"),
        (parts(data)[1][0], " No <|im_end|>\n"),
    ]
    assert data.meta.end is None


def test_a_data_set_of_chats_records_what_counts_and_refuses_earlier_readers(tmp_path):
    data = built(tmp_path, {"messages": HELLO}, {"messages": TWICE})
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["format"] == 2
    assert meta["crc32"].keys() == {"tokens.bin", "documents.npy", "tokenizer.json", "counted.bin"}
    assert [counted for _, counted in parts(data)] == [
        *("Hi.<|im_end|>\n", "Hi.<|im_end|>\n No <|im_end|>\n")
    ]
    data.verify()
    path = tmp_path / "out" / "counted.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"counted\.bin is truncated: \d+ bytes, meta\.json says"):
        TokenSet(tmp_path / "out")
    with pytest.raises(ValueError, match=r"counted\.bin was cut while it is read"):
        data.read_counted(0, 1)


FAULTS = {
    r"chats.jsonl:1: messages\[0\] has no role: it has content": {"messages": [{"content": "a"}]},
    r"chats.jsonl:1: messages\[0\] has no content: it has role": {
        "messages": [{"role": "user", "content": None}]
    },
    r"chats.jsonl:1 has no turn of the assistant": {"messages": HELLO[:1]},
    r"chats.jsonl:1 has no turn": {"prompt": HELLO, "completion": HELLO[:1]},
    r"chats.jsonl:1 has neither messages nor prompt and completion: it has text": {"text": "a"},
    r"chats.jsonl:1 is 'a': an object is expected": "a",
    r"chats.jsonl:1: 'messages' is \[\]: a list of messages is expected": {"messages": []},
    r"chats.jsonl:1: messages\[0\] is 'a': an object of role and content": {"messages": ["a"]},
    r"chats.jsonl:1 has tools: tools are not supported": {"messages": HELLO, "tools": [{"a": 1}]},
    r"chats.jsonl:1 has images: images and sound": {"messages": HELLO, "images": ["a.png"]},
    r"messages\[1\] has tool_calls: tools are": {
        "messages": [HELLO[0], {"role": "assistant", "content": "a", "tool_calls": [{"id": 1}]}]
    },
    r"messages\[2\] has the role tool: tools are": {"messages": [*HELLO, *said(("tool", "a"))]},
    r"messages\[0\]: its content is a list \(image, text\)": {
        "messages": said(("user", [{"type": "text"}, {"type": "image"}]))
    },
    r"messages\[0\]: 'weight' is 0, a text is expected": {
        "messages": [{**HELLO[0], "weight": 0}, HELLO[1]]
    },
    r"character 1 of 'content' is \\ud800, half of a pair": {"messages": said(("user", "a\ud800"))},
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_row_that_cannot_be_trained_on_is_refused_with_its_line(tmp_path, message):
    with pytest.raises(ValueError, match=message):
        list(read_rows(written(tmp_path / "chats.jsonl", FAULTS[message])))


def test_files_that_cannot_be_read_are_refused(tmp_path):
    path = tmp_path / "chats.jsonl"
    for content, message in {
        b"\n": "chats.jsonl has no conversation. Each row has messages",
        b"{": r"chats.jsonl:1: no JSON: .* at character 1",
        b"[" * 100000: "chats.jsonl:1 cannot be read: it is nested too deeply",
        b"\xff": "chats.jsonl:1 is not UTF-8: byte 0 is 0xff",
    }.items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            list(read_rows(path))
    with pytest.raises(ValueError, match=r"nowhere\.jsonl: no such file"):
        list(read_rows(tmp_path / "nowhere.jsonl"))
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=r"a\.parquet is no whole Parquet file"):
        list(read_rows(tmp_path / "a.parquet"))
    assert not is_chat_file(tmp_path)


def test_an_example_without_a_counted_token_is_refused_and_leaves_nothing(tmp_path):
    template = Template("{% for m in messages %}{{ m.role }}{% endfor %}", {}, "empty.jinja")
    tokenizer: Any = load_tokenizer(str(CHATS / "tokenizer.json"))
    silent = Template(template.text + "{% generation %}{% endgeneration %}", {}, "silent.jinja")
    path = written(tmp_path / "a.jsonl", {"messages": HELLO})
    with pytest.raises(ValueError, match=r"a\.jsonl:1: the loss would count no token of it"):
        build_chats(path, tmp_path / "out", tokenizer, silent)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl"]
    with pytest.raises(ValueError, match=r"a\.jsonl:1: conversations need a template"):
        build_chats(path, tmp_path / "out", tokenizer, None)
    for options, message in {
        ("turns", "last"): "--data.turns last: all or each",
        ("today", "today"): "--data.date today: a date as 2024-07-26 is needed",
    }.items():
        with pytest.raises(ValueError, match=message):
            ChatOptions(**dict([options]))


def lengths(data):
    return np.diff(data.documents)


def test_long_conversations_are_cut_or_dropped_and_the_rest_is_packed(tmp_path):
    long = said(("user", "Hello " * 40), ("assistant", "four"))
    rows = [{"messages": HELLO}, {"messages": long}, {"messages": TWICE}, {"messages": HELLO}]
    data = built(tmp_path, *rows)
    sizes = lengths(data)
    length = int(sizes[2]) - 2  # the third is one token too long
    cut = Loader(data, 1, length, packing="documents", epochs=1, shuffle=False)
    dropped = Loader(data, 1, length, packing="documents", long_chats="drop", epochs=1)
    counted = lambda loader: sum(int(batch["mask"].sum()) for batch in loader)
    sets: Any = [*cut._sets, *dropped._sets]
    cut_set, dropped_set = sets
    number = lambda fitted: (fitted.num_long, fitted.num_uncounted, fitted.num_dropped)
    assert number(cut_set.fitted) == (2, 1, int(sizes[1]) + 1)
    assert number(dropped_set.fitted) == (2, 0, int(sizes[1] + sizes[2]))
    offsets = data.documents.tolist()
    of = lambda i: int(data.read_counted(offsets[i] + 1, offsets[i + 1]).sum())
    assert counted(cut) == of(0) + of(2) - 1 + of(3)
    assert counted(dropped) == of(0) + of(3)
    with pytest.raises(ValueError, match=r"in none of its 4 conversations .* within 3 tokens"):
        Loader(data, 1, 2, packing="documents")


def test_a_loader_refuses_a_stream_of_chats_and_unknown_options(tmp_path):
    data = built(tmp_path, {"messages": TWICE})
    for options, message in [
        ({}, r"holds conversations, which are read whole: give packing='documents'"),
        ({"long_chats": "split"}, "long_chats='split': one of cut, drop"),
        ({"loss_per": "turn"}, "loss_per='turn': one of token, example"),
    ]:
        with pytest.raises(ValueError, match=message):
            Loader(data, 1, 8, **options)
    plain = hfjax.data.write_tokens(tmp_path / "plain", [np.arange(9)], vocab=9)
    with pytest.raises(ValueError, match=r"loss_per='example': it is of whole documents"):
        Loader(plain, 1, 4, loss_per="example")
    state = Loader(data, 1, 40, packing="documents").state()
    with pytest.raises(ValueError, match="another stream"):
        Loader(data, 1, 40, packing="documents", loss_per="example").restore(state)


def test_the_loss_per_token_and_per_example_is_the_plain_one_on_every_mesh(tmp_path):
    import jax
    import optax

    number = lambda i: said(("user", f"{i}?"), ("assistant", "four " * (1 + i % 3)))
    data = built(tmp_path, *({"messages": number(i)} for i in range(16)))
    table = np.random.default_rng(0).normal(size=(data.vocab, data.vocab)).astype(np.float32)
    offsets, length = data.documents.tolist(), int(lengths(data).max()) + 3
    log_p = np.asarray(jax.nn.log_softmax(table))

    def losses(i):
        ids = data.read(offsets[i], offsets[i + 1])
        counted = data.read_counted(offsets[i] + 1, offsets[i + 1])
        return -log_p[ids[:-1], ids[1:]][counted > 0]

    by_example = [losses(i) for i in range(16)]
    plain = {
        "token": np.concatenate(by_example).mean(),
        "example": np.mean([of.mean() for of in by_example]),
    }
    loss = lambda params, batch: next_token_loss(params["t"][batch["tokens"][:, :-1]], batch)
    for per, wanted in plain.items():
        options = {"packing": "documents", "loss_per": per, "epochs": 1, "pad_last": True}
        loader = Loader(data, 16, length, **options)
        batch, results = next(loader), []
        meshes: Any = (({"data": 1}, 1), ({"data": 2, "fsdp": 2}, 2))
        for mesh, accumulate in meshes:
            layout = hfjax.layout(
                lambda rngs: {"t": jax.numpy.asarray(table)},
                optax.sgd(1.0),
                hfjax.make_mesh(**mesh),
                hfjax.FSDP if "fsdp" in mesh else hfjax.DDP,
            )
            step = hfjax.train_step(layout, loss, gradient_accumulation_steps=accumulate)
            state, metrics = step(hfjax.init(layout), batch)
            assert float(metrics["loss"]) == pytest.approx(wanted, rel=1e-5), (per, mesh)
            results.append(np.asarray(state.params["t"]))
        np.testing.assert_allclose(results[0], results[1], atol=1e-6)
        assert np.abs(results[0] - table).max() > 1e-3
