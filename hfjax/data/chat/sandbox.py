"""The program of the process that renders templates: it knows Jinja and the standard library only.

A template is code of a stranger. Jinja's sandbox keeps it from attributes and from changing what it
reads; a limit of time and memory, which only a process has, keeps it from looping for ever. Each
line of standard input is a request, each line of standard output its answer, as JSON.
"""

import json
import re
import resource
import signal
import sys
import traceback
from datetime import date
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.utils
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 4 << 30  # bytes of address space
SECONDS = 10  # for a conversation; the reader of the answers gives up a little later
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class RaisedError(TemplateError):
    """What a template says by `raise_exception`."""


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`: its parts of the text become `spans`."""

    tags = {"generation"}  # noqa: RUF012  Jinja reads it so

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        """Return the call that renders such a block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_record"), [], [], body).set_lineno(line)

    def _record(self, caller: Any) -> str:
        text = caller()
        start = self.environment.text_length  # type: ignore[attr-defined]
        self.environment.spans.append((start, start + len(text)))  # type: ignore[attr-defined]
        return text


class PlainNamespace(jinja2.utils.Namespace):
    """Jinja's `namespace`, without names that begin with _: some have a meaning to Python."""

    def __init__(*args: Any, **values: Any) -> None:
        for name in dict(*args[1:], **values):
            check_name(name)
        jinja2.utils.Namespace.__init__(*args, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name)
        super().__setitem__(name, value)


def check_name(name: str) -> None:
    """Refuse a name of a namespace that begins with _."""
    if name.startswith("_"):
        raise SecurityError(f"attribute {name!r} of a namespace is not for templates")


class Environment(ImmutableSandboxedEnvironment):
    """The environment of chat templates, as transformers has it, with a fixed date."""

    def __init__(self, today: date) -> None:
        extensions = [GenerationTag, jinja2.ext.loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.text_length, self.spans = 0, []
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = today.strftime
        self.globals["namespace"] = PlainNamespace

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refuse an attribute that may lead out of the sandbox, also where it is only printed."""
        kind = type(obj).__name__
        raise SecurityError(f"attribute {attribute!r} of a {kind} is not for templates")


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without Jinja's escapes of HTML."""
    options: dict[str, Any] = {"indent": indent, "separators": separators}
    return json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys, **options)


def raise_exception(message: str) -> None:
    """Refuse a conversation, with the template's own words."""
    raise RaisedError(message)


class Renderer:
    """A compiled template, and the tokens that it may name."""

    def __init__(self, template: str, tokens: dict[str, Any], today: str) -> None:
        self.environment = Environment(date.fromisoformat(today))
        self.template, self.tokens = self.environment.from_string(template), tokens

    def render(self, messages: list[dict[str, Any]], prompt: bool) -> dict[str, Any]:
        """Return the text of messages, and the spans of `{% generation %}` in it."""
        env, blocks = self.environment, []
        env.text_length, env.spans = 0, []
        values = {"messages": messages, "tools": None, "documents": None, **self.tokens}
        for block in self.template.generate(add_generation_prompt=prompt, **values):
            blocks.append(block)
            env.text_length += len(block)
        return {"text": "".join(blocks), "spans": env.spans}


def describe(error: BaseException) -> dict[str, Any]:
    """Return a failure as JSON: its kind, its message, the line of the template."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    line = error.lineno if isinstance(error, TemplateSyntaxError) else (lines or [None])[-1]
    kinds = {RaisedError: "raised", SecurityError: "refused", TemplateSyntaxError: "syntax"}
    kind = next((name for cls, name in kinds.items() if isinstance(error, cls)), "failed")
    message = str(error) or type(error).__name__
    return {"error": kind, "message": message, "line": line}


def answer(request: Any, renderer: Renderer | None) -> tuple[Any, Renderer | None]:
    """Return the answer to a request: the first compiles, the others render."""
    signal.alarm(2 * SECONDS)  # if the reader is gone, nobody else ends a loop
    try:
        if renderer is None:
            return {"has_spans": bool(GENERATION.search(request["template"]))}, Renderer(**request)
        return [renderer.render(messages, prompt) for messages, prompt in request], renderer
    except Exception as error:  # whatever a template does
        return describe(error), renderer
    finally:
        signal.alarm(0)


def main() -> None:
    """Answer requests until there are no more."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    renderer = None
    for line in sys.stdin:
        reply, renderer = answer(json.loads(line), renderer)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
