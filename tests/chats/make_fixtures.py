# ruff: noqa: RUF001
"""Write what transformers makes of conversations with the templates that trl ships.

Run where both are installed: `python -m tests.chats.make_fixtures`. The templates themselves are
not copied: a fixture has the rendered texts, the spans of `{% generation %}` and the tokens.
"""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

TODAY = "2026-11-29"
FOLDER = Path(__file__).parent
TEMPLATES = (
    *("llama3_training", "qwen2_5_training", "qwen3_training", "gemma3_training"),
    *("phi3_training", "deepseekv3_training", "cohere2_training", "glm4moe_training"),
)
PLAIN = ("llama3", "llama3_1", "qwen2_5", "gemma3", "phi3", "cohere2")  # without generation tags
SPECIAL = (
    *("<|begin_of_text|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<end_of_turn>"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜end▁of▁sentence｜>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    *("<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "[gMASK]", "<sop>"),
)
TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|endoftext|>"}
user = lambda text: {"role": "user", "content": text}
answer = lambda text: {"role": "assistant", "content": text}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [user("Hello!"), answer("How are you today?")],
    [
        {"role": "system", "content": "Be brief."},
        *(user("2 + 2?  "), answer("\n\nfour, é 😀"), user("and\n5?"), answer(" <b>five</b> ")),
    ],
]


def small_tokenizer() -> Any:
    """Return a byte-level tokenizer of a few merges that knows the special tokens."""
    from hfjax.data.tokenizer import train_bpe

    tokenizer = train_bpe(["Hello how are you today? user assistant system four five\n\n"] * 9, 300)
    tokenizer.inner.add_special_tokens(list(SPECIAL))
    return tokenizer


def chat_of(name: str) -> str:
    """Return a template that trl ships."""
    from importlib.util import find_spec

    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def theirs(tokenizer: Any, template: str, messages: list[dict[str, Any]]) -> tuple[list, list]:
    """Return the tokens and the mask that transformers makes of a conversation."""
    from tokenizers import Tokenizer

    inner = Tokenizer.from_str(tokenizer.inner.to_str())
    fast = import_module("transformers").PreTrainedTokenizerFast(tokenizer_object=inner, **TOKENS)
    out = fast.apply_chat_template(
        messages,
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return out["input_ids"], out["assistant_masks"]


def main() -> None:
    """Write the fixtures."""
    from hfjax.data.chat.template import Template, TemplateProcess

    tokenizer, cases = small_tokenizer(), []
    for name in (*TEMPLATES, *PLAIN):
        template = chat_of(name)
        with TemplateProcess(Template(template, TOKENS, name), TODAY) as process:
            for number, messages in enumerate(CONVERSATIONS):
                rendered = process.render([(messages, False)], "")[0]
                tokens, mask = theirs(tokenizer, template, messages)
                spans = list(map(list, rendered.spans))
                case = {"template": name, "conversation": number, "text": rendered.text}
                cases.append({**case, "spans": spans, "tokens": tokens, "mask": mask})
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (FOLDER / "rendered.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    (FOLDER / "tokenizer.json").write_text(tokenizer.inner.to_str(), encoding="utf-8")


if __name__ == "__main__":
    main()
