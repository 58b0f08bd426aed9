"""With transformers and trl at hand: tokens and mask of chats are theirs, for every template.

Slow, and skipped where they are not installed; tests/chats has what they computed before.
"""

from typing import Any

import pytest

from hfjax.data.chat.conversations import parse_row
from hfjax.data.chat.encode import ChatEncoder
from hfjax.data.chat.template import Template, TemplateProcess
from hfjax.data.chat.turns import render_examples
from tests.chats.make_fixtures import (
    CONVERSATIONS,
    PLAIN,
    TEMPLATES,
    TODAY,
    TOKENS,
    chat_of,
    small_tokenizer,
    theirs,
)
from tests.chats.templates import CHATML, TAGGED

pytest.importorskip("transformers")
pytest.importorskip("trl")
OWN = {"chatml": CHATML, "tagged": TAGGED}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TEMPLATES, *PLAIN, *OWN])
def test_tokens_and_mask_are_those_of_transformers(name):
    tokenizer, text = small_tokenizer(), OWN.get(name) or chat_of(name)
    encoder = ChatEncoder(tokenizer)
    with TemplateProcess(Template(text, TOKENS, name), TODAY) as process:
        for messages in CONVERSATIONS:
            row: Any = parse_row({"messages": messages}, "a:1")
            ((ids, mask),) = encoder.encode(render_examples(row, process, encoder.specials, "all"))
            tokens, counted = theirs(tokenizer, text, messages)
            assert ids.tolist() == tokens
            assert process.has_spans == (name in TEMPLATES or name == "tagged")
            assert mask.tolist() == counted or not process.has_spans
            assert mask.any()
