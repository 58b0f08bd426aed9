"""What the loss counts of a conversation: the assistant's turns, to the end of each.

A template marks them with `{% generation %}`. Of others, the text before a turn (and the head of an
answer) is compared with the text after it: what is more is the turn.
"""

from collections.abc import Callable
from dataclasses import replace

from hfjax.data.chat.conversations import ASSISTANT, KNOWN_ROLES, Conversation
from hfjax.data.chat.special_tokens import MarkedText, SpecialTokens
from hfjax.data.chat.template import Span, TemplateProcess
from hfjax.utils.tables import quote

ALL, EACH = "all", "each"
SHOWN = 60  # characters of a text in a message

# Returns the texts of the first N messages, each with or without the head of an answer.
Render = Callable[[list[tuple[int, bool]]], list[MarkedText]]


def render_examples(
    conversation: Conversation, process: TemplateProcess, specials: SpecialTokens, turns: str
) -> list[MarkedText]:
    """Return the examples of a conversation with the spans that the loss counts.

    Args:
        conversation: The conversation.
        process: What renders the template.
        specials: The special tokens of the tokenizer.
        turns: all (one example), or each (one for each turn of the assistant, which ends with it).
    """
    marking, location = specials.mark(conversation.messages), conversation.location

    def render(jobs: list[tuple[int, bool]]) -> list[MarkedText]:
        messages = [(marking.messages[:count], prompt) for count, prompt in jobs]
        return [marking.unmark(text) for text in process.render(messages, location)]

    count = len(conversation.messages)
    chosen = [
        i
        for i, message in enumerate(conversation.messages)
        if message["role"] == ASSISTANT and i >= conversation.first
    ]
    find = _tagged_spans if process.has_spans else _compared_spans
    if turns == ALL:
        examples = [find(render, chosen, count, conversation.first, specials, location)]
    else:
        examples = [find(render, [i], i + 1, i, specials, location) for i in chosen]
    _check_roles(conversation, examples[-1].text)
    return examples


def _tagged_spans(
    render: Render, turns: list[int], count: int, first: int, specials: SpecialTokens, location: str
) -> MarkedText:
    """Return the text of `count` messages with the spans of `{% generation %}` from `first` on."""
    if first == 0:
        return render([(count, False)])[0]
    before, full = render([(first, False), (count, False)])
    return replace(full, spans=full.spans[len(before.spans) :])


def _compared_spans(
    render: Render, turns: list[int], count: int, first: int, specials: SpecialTokens, location: str
) -> MarkedText:
    """Return the text of `count` messages with the span of each turn, found by comparison."""
    jobs = [job for turn in turns for job in ((turn, True), (turn + 1, False))]
    *parts, full = render([*jobs, (count, False)])
    spans = list[Span]()
    for turn, before, after in zip(turns, parts[::2], parts[1::2], strict=True):
        end = _turn_end(after.text, full.text, specials)
        if end is None or not full.text.startswith(before.text):
            other = after.text if end is None else before.text
            raise ValueError(_no_prefix_message(other, full.text, turn, location, first))
        spans.append((len(before.text), end))
    return replace(full, spans=tuple(spans))


def _turn_end(text: str, full: str, specials: SpecialTokens) -> int | None:
    """Return where a turn ends that is the last of a text; None if the full text begins otherwise.

    Some templates put a further token behind the last turn's end, as Phi-3's.
    """
    if full.startswith(text):
        return len(text)
    last = next(reversed(list(specials.pattern.finditer(text))), None)
    if last is None or text[last.end() :].strip():
        return None
    turn = text[: last.start()]
    has_end = any(turn.rstrip().endswith(token) for token in specials.by_text)
    return len(turn) if has_end and full.startswith(turn) else None


def _no_prefix_message(part: str, full: str, turn: int, location: str, first: int) -> str:
    """Return the message about a text that is no beginning of the whole one."""
    at = max(shared_length(part, full) - SHOWN // 3, 0)
    shorten = lambda text: quote("…" * (at > 0) + text[at : at + SHOWN])
    each = ""
    if first == 0:
        each = " Or train on one example for each turn, which ends with it: --data.turns each."
    return (
        f"{location}: the template writes the text up to message {turn} in another way when the "
        f"conversation goes on, so which part is the assistant's is not known. Alone:\n  "
        f"{shorten(part)}\nin the conversation:\n  {shorten(full)}\nGive a template for training, "
        "which marks the assistant's part by {% generation %}: --data.template FILE (those of the "
        f"package trl are named *_training.jinja).{each}"
    )


def shared_length(part: str, full: str) -> int:
    """Return how many characters two texts share from their beginnings on.

    >>> shared_length("ab", "abc"), shared_length("axc", "abc")
    (2, 1)
    """
    if full.startswith(part):
        return len(part)
    differ = (i for i, (a, b) in enumerate(zip(part, full, strict=False)) if a != b)
    return next(differ, min(len(part), len(full)))


def _check_roles(conversation: Conversation, text: str) -> None:
    """Refuse a message that the template leaves out, since it does not know the role."""
    for i, message in enumerate(conversation.messages):
        is_known = message["role"] in KNOWN_ROLES
        if not is_known and message["content"].strip() not in text:
            raise ValueError(
                f"{conversation.location}: the template leaves out message {i}, of the role "
                f"{quote(message['role'])}. Its roles are {', '.join(KNOWN_ROLES)}: use these, or "
                "give a template that knows the role: --data.template FILE"
            )
