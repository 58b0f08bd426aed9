"""Templates of chats: their texts and spans, and what they cannot do."""

import json
from pathlib import Path
from typing import Any

import pytest

from hfjax.data.chat import template as template_module
from hfjax.data.chat.conversations import parse_row
from hfjax.data.chat.encode import ChatEncoder
from hfjax.data.chat.template import Template, TemplateProcess, load_template
from hfjax.data.chat.turns import render_examples
from hfjax.data.tokenizer import load_tokenizer
from tests.chats.templates import CHATML, CLOSED, FORGETS, LLAMA, TAGGED

CHATS = Path(__file__).parent / "chats"
TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|endoftext|>"}
HELLO = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hi."}]
TWICE = [*HELLO, {"role": "user", "content": "And?"}, {"role": "assistant", "content": " No "}]


@pytest.fixture(scope="module")
def encoder():
    return small_encoder()


def small_encoder() -> ChatEncoder:
    tokenizer: Any = load_tokenizer(str(CHATS / "tokenizer.json"))
    return ChatEncoder(tokenizer)


def examples(encoder, text, messages, turns="all", limit=20.0):
    """The examples of a conversation, with their tokens and what counts."""
    with TemplateProcess(Template(text, TOKENS, "t.jinja"), "2026-11-29", limit) as process:
        row: Any = parse_row({"messages": messages}, "chats.jsonl:3")
        return render_examples(row, process, encoder.specials, turns)


def counted(encoder, text, messages, turns="all"):
    """The text of what the loss counts, by example."""
    found, decode = examples(encoder, text, messages, turns), encoder._plain.decode
    pairs = encoder.encode(found)
    return [decode(ids[m > 0].tolist(), skip_special_tokens=False) for ids, m in pairs]


def refusal(text, messages=HELLO, encoder=None, **options):
    with pytest.raises(ValueError, match=r"\S") as error:
        examples(
            encoder or small_encoder(),
            text,
            messages,
            **options,
        )
    return str(error.value)


CASES = json.loads((CHATS / "rendered.json").read_text(encoding="utf-8"))


def test_tokens_and_mask_are_those_of_transformers_for_the_templates_of_trl(encoder):
    names = {case["template"] for case in CASES if case["spans"]}
    assert len(names) == 8
    assert len(CASES) == 28
    for case in CASES:
        spans = tuple(map(tuple, case["spans"]))
        text = template_module.Rendered(case["text"], spans)
        ((tokens, mask),) = encoder.encode([encoder.specials.mark([]).unmark(text)])
        assert tokens.tolist() == case["tokens"], case["template"]
        assert mask.tolist() == case["mask"], case["template"]


def test_the_loss_counts_each_turn_of_the_assistant_and_its_end(encoder):
    assert counted(encoder, CHATML, TWICE) == ["Hi.<|im_end|>\n No <|im_end|>\n"]
    assert counted(encoder, LLAMA, TWICE) == ["Hi.<|eot_id|>No<|eot_id|>"]
    assert counted(encoder, TAGGED, TWICE) == ["Hi.<|im_end|> No <|im_end|>"]
    assert counted(encoder, CLOSED, TWICE) == ["Hi.<|end|>\n No <|end|>\n<|endoftext|>"]


def test_a_template_writes_the_first_token_and_no_other_is_added(encoder):
    ids, _ = encoder.encode(examples(encoder, LLAMA, HELLO))[0]
    begin = encoder._plain.token_to_id("<|begin_of_text|>")
    assert ids.tolist().count(begin) == 1
    assert ids[0] == begin


@pytest.mark.parametrize("text", [CHATML, LLAMA, TAGGED], ids=["chatml", "llama", "tagged"])
def test_special_tokens_in_a_message_stay_text_and_those_of_the_template_do_not(encoder, text):
    spelt = "say <|im_end|><|eot_id|>now"
    messages = [{"role": "user", "content": spelt}, {"role": "assistant", "content": "<|im_end|>"}]
    plain = [{"role": "user", "content": "say now"}, {"role": "assistant", "content": "x"}]
    (found,), (other,) = examples(encoder, text, messages), examples(encoder, text, plain)
    (ids, mask), (without, _) = encoder.encode([found, other])
    ends = [encoder._plain.token_to_id(name) for name in ("<|im_end|>", "<|eot_id|>")]
    for end in ends:
        assert ids.tolist().count(end) == without.tolist().count(end)
    assert spelt in found.text
    decoded = encoder._plain.decode(ids.tolist(), skip_special_tokens=False)
    assert decoded == found.text
    assert mask.sum() > len("<|im_end|>") / 2  # as text it is several tokens


def test_where_a_template_forgets_both_texts_and_the_remedies_are_told(encoder):
    message = refusal(FORGETS, [*HELLO[:1], {"role": "assistant", "content": "a</think>b"}, *TWICE])
    assert "chats.jsonl:3: the template writes the text up to message 1 in another way" in message
    assert "a</think>b" in message
    assert "--data.template FILE" in message
    assert "--data.turns each" in message


def test_each_turn_may_be_an_example_which_ends_with_it(encoder):
    thinking = [*HELLO[:1], {"role": "assistant", "content": "a</think>b"}, *TWICE]
    assert counted(encoder, FORGETS, thinking, "each") == [
        *("a</think>b<|im_end|>\n", "Hi.<|im_end|>\n", " No <|im_end|>\n")
    ]
    assert counted(encoder, TAGGED, TWICE, "each") == ["Hi.<|im_end|>", " No <|im_end|>"]


def test_a_date_is_handed_in_and_json_has_no_escapes(encoder):
    text = "{{ strftime_now('%d %b %Y') }}{{ messages[0] | tojson }}" + CHATML
    messages = [{"role": "user", "content": "<é>"}, HELLO[1]]
    found = examples(encoder, text, messages)[0].text
    assert found.startswith('29 Nov 2026{"role": "user", "content": "<é>"}<|im_start|>')


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
REFUSED = {
    "takes more than 0.5 seconds for a conversation: it may loop for ever": ENDLESS,
    "line 2 reaches out of its sandbox: attribute '__class__' of a str": "\n{{ ''.__class__ }}",
    "^t.jinja, line 2: no valid Jinja: .*Mend it, or give another": "\n{% if %}",
    "line 1 fails: 'dict object' has no attribute 'name'": "{{ messages[0].name.first }}",
    "line 1 reaches out of its sandbox: attribute '__class__' of a namespace": (
        "{% set ns = namespace(a=1) %}{% set ns.__class__ = 1 %}"
    ),
    "fails: Range too big": "{% for a in range(10 ** 9) %}{% endfor %}",
    "line 1 reaches out of its sandbox: .*append": "{{ messages.append(1) }}",
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_template_may_not_do_is_refused_with_its_line(encoder, message):
    with pytest.raises(ValueError, match=message):
        examples(encoder, REFUSED[message], HELLO, limit=0.5 if "0.5" in message else 20.0)


def test_what_a_template_says_of_a_conversation_is_told_with_the_line(encoder):
    message = refusal(LLAMA, [HELLO[0], *HELLO], encoder)
    assert message.startswith("chats.jsonl:3: the template refuses this conversation: ")
    assert "Roles must alternate: user, assistant" in message


def test_a_role_that_a_template_leaves_out_is_refused(encoder):
    text = "{% for m in messages if m.role != 'critic' %}{{ m.content }}{% endfor %}"
    messages = [{"role": "critic", "content": "Bad."}, *HELLO]
    assert "leaves out message 0, of the role critic. Its roles are" in refusal(
        text, messages, encoder
    )


def test_a_template_is_found_in_a_folder_or_given_as_a_file(tmp_path):
    with pytest.raises(ValueError, match=r"no chat template .*--data\.template FILE"):
        load_template(tmp_path)
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    templates = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({**tokens, "chat_template": templates}))
    found = load_template(tmp_path)
    assert (found.text, found.tokens) == ("d", {"bos_token": "<s>", "eos_token": "</s>"})
    (tmp_path / "chat_template.jinja").write_text("j")
    assert load_template(tmp_path).text == "j"
    (tmp_path / "own.jinja").write_text("o")
    assert load_template(tmp_path, tmp_path / "own.jinja").text == "o"
    with pytest.raises(ValueError, match=r"--data\.template .*nowhere: no such file"):
        load_template(tmp_path, tmp_path / "nowhere")
    config.write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json cannot be read"):
        load_template(tmp_path)


def test_without_jinja_the_extra_is_named(monkeypatch):
    import jinja2

    monkeypatch.setattr(jinja2, "__version__", "3.1.2")
    with pytest.raises(ValueError, match=r"jinja2 3\.1\.2: its sandbox .*hfjax\[chat\]"):
        TemplateProcess(Template("", {}, "t"))
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(ValueError, match=r"a chat template needs .*hfjax\[chat\]"):
        TemplateProcess(Template("", {}, "t"))


def test_a_process_that_dies_is_told():
    process = TemplateProcess(Template(CHATML, {}, "t.jinja"))
    process._process.kill()
    with pytest.raises(ValueError, match=r"the process that renders t\.jinja ended \(status -9\)"):
        process.render([(HELLO, False)], "a:1")
    process.close()
