"""Renders a chat template of jinja2; run as a file, it does so for the process that started it.

A template comes with a model, and whoever wrote it may have made it loop for ever, or multiply a
text by a billion. jinja2's sandbox keeps it from Python's internals, not from either. So templates
are rendered in a process of their own, which can be ended at any time
(jaxattn/text/renderer_process.py). This file imports nothing of jaxattn, so that the process starts
without JAX.

Requests and answers are JSON, after a length of 8 bytes.
"""

import datetime
import functools
import json
import sys
from collections.abc import Callable
from typing import IO, Any, NoReturn

import jinja2
from jinja2 import ext, nodes, sandbox
from jinja2.parser import Parser

LENGTH_BYTES = 8
MOST_SAID = 500  # characters of a message


class OutputTooLong(Exception):
    """A template wrote more characters than it may."""


class TemplateRefusal(Exception):
    """A template called raise_exception: the messages are not what it is written for."""


class GenerationTag(ext.Extension):
    """The tags {% generation %} and {% endgeneration %}, which mark what training is done on."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ToolArguments(dict[str, Any]):
    """The arguments of a tool call: a mapping that reads as its JSON where a text is wanted.

    Some templates go through the arguments as a mapping, and some put them into a text. Clients
    send a text.
    """

    def __init__(self, values: dict[str, Any], text: str):
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


class AbsentContent(str):
    """The content of a message without one: an empty text that counts as `none` too.

    Some templates tell a tool call by `content is none`, and some expect a text always.
    """

    def __eq__(self, other: object) -> bool:
        return other is None or str(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


@functools.cache
def environment() -> sandbox.ImmutableSandboxedEnvironment:
    """What templates of published models are written for, as `transformers` renders them."""
    made = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, ext.loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.tests["none"] = lambda value: value is None or isinstance(value, AbsentContent)
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training; jinja2's own filter escapes <, >, & and '."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def raise_exception(message: str) -> NoReturn:
    """What a template calls to refuse messages."""
    raise TemplateRefusal(message)


@functools.lru_cache(maxsize=8)
def compiled(source: str) -> jinja2.Template:
    return environment().from_string(source)


def render(source: str, variables: dict[str, Any], most: int) -> str:
    """The text of a template.

    Args:
        source: of the template.
        variables: `messages` among them, of OpenAI's form.
        most: characters that it may have.

    Raises:
        OutputTooLong: it has more.
        TemplateRefusal: the template refuses the messages.
        Exception: whatever the template raises.
    """
    found = {**variables, "messages": [readable(each) for each in variables["messages"]]}
    parts: list[str] = []
    length = 0
    for part in compiled(source).generate(**found):
        length += len(part)
        if length > most:
            raise OutputTooLong
        parts.append(part)
    return "".join(parts)


def readable(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a content, and with arguments that read as a mapping and as a text."""
    content, calls = message.get("content"), message.get("tool_calls")
    # Beside calls some clients send an empty text for none.
    absent = content is None or (content == "" and calls)
    made = {**message, "content": AbsentContent() if absent else content}
    if isinstance(calls, list):
        made["tool_calls"] = [_readable_call(call) for call in calls]
    return made


def _readable_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    made = dict(call)
    if isinstance(call.get("function"), dict):
        made["function"] = _readable_call(call["function"])
    given = call.get("arguments")
    if isinstance(given, dict):
        made["arguments"] = ToolArguments(given, to_json(given))
    elif isinstance(given, str):
        try:
            values = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError):
            return made
        if isinstance(values, dict):
            made["arguments"] = ToolArguments(values, given)
    return made


def answer(request: dict[str, Any]) -> dict[str, str]:
    """The text, or under "failed" or "refused" why there is none."""
    try:
        return {"text": render(request["source"], request["variables"], request["most"])}
    except OutputTooLong:
        return {"failed": f"wrote more than {request['most']:,} characters"}
    except MemoryError:
        raise
    except jinja2.TemplateSyntaxError as error:
        return {"failed": f"has an error in line {error.lineno}: {_cut(error.message)}"}
    except TemplateRefusal as error:
        return {"refused": _cut(str(error))}
    except Exception as error:  # the template's own: it may raise whatever Python does
        return {"failed": f"raised {type(error).__name__}: {_cut(str(error))}"}


def _cut(said: str | None) -> str:
    """A message, which may have parts of the chat or of the template."""
    return (said or "")[:MOST_SAID]


def packed(message: object) -> bytes:
    """A message with its length.

    Raises:
        TypeError, ValueError, RecursionError: it is no value of JSON.
    """
    body = json.dumps(message).encode("ascii")
    return len(body).to_bytes(LENGTH_BYTES) + body


def receive(stream: IO[bytes]) -> Any:
    """The next message; None at the end of the stream."""
    head = stream.read(LENGTH_BYTES)
    length = int.from_bytes(head)
    body = stream.read(length)
    return json.loads(body) if len(head) == LENGTH_BYTES and len(body) == length else None


def send(stream: IO[bytes], data: bytes) -> None:
    stream.write(data)
    stream.flush()


def limit(most_bytes: int) -> Callable[[float], None]:
    """Limits the memory of this process, and gives what sets its clock to seconds; 0 stops it.

    A process whose parent has died ends itself by the clock. Where the system has no such limits
    only the parent ends it.
    """
    try:
        import resource
        import signal
    except ImportError:  # Windows
        return lambda seconds: None
    try:
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ValueError, OSError):
        pass  # macOS has the limit and refuses to set it
    # The default action ends the process, also within a call of C that takes for ever.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def clock(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)

    return clock


def main(most_bytes: int, seconds: float) -> None:
    """Answers requests until stdin ends."""
    clock = limit(most_bytes)
    environment()
    send(sys.stdout.buffer, packed("ready"))
    while (request := receive(sys.stdin.buffer)) is not None:
        clock(seconds)
        reply = answer(request)
        clock(0)
        send(sys.stdout.buffer, packed(reply))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
