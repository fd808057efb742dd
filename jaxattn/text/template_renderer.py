"""The rendering of jinja2 chat templates. Run as a script, this file serves its parent process.

A template comes with a model, and its author may have made it loop forever or multiply a text by a
billion. jinja2's sandbox protects Python's internals, but prevents neither. Templates are therefore
rendered in a separate process, which can be killed at any time
(jaxattn/text/renderer_process.py). This file imports nothing from jaxattn, so that the process
starts without JAX.

Requests and replies are JSON, preceded by their length in 8 bytes.
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
MOST_SAID = 500  # characters of an error message


class OutputTooLong(Exception):
    """A template wrote more characters than the limit."""


class TemplateRefusal(Exception):
    """A template called raise_exception to reject its messages."""


class GenerationTag(ext.Extension):
    """The tags {% generation %} and {% endgeneration %}, which mark the text to train on."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ToolArguments(dict[str, Any]):
    """The arguments of a tool call, as a mapping that converts to its JSON text.

    Some templates iterate over the arguments as a mapping, and some insert them into text. Clients
    send text.
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
    """The content of a message without one: an empty string that also equals `none`.

    Some templates recognize a tool call by `content is none`, and others always expect a string.
    """

    def __eq__(self, other: object) -> bool:
        return other is None or str(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


@functools.cache
def environment() -> sandbox.ImmutableSandboxedEnvironment:
    """Returns a jinja2 environment like that of `transformers`, as published templates expect."""
    jinja_environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, ext.loopcontrols]
    )
    jinja_environment.filters["tojson"] = to_json
    jinja_environment.tests["none"] = lambda value: (
        value is None or isinstance(value, AbsentContent)
    )
    jinja_environment.globals["raise_exception"] = raise_exception
    jinja_environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return jinja_environment


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON as in the models' training; jinja2's own filter escapes <, >, & and '."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def raise_exception(message: str) -> NoReturn:
    """Rejects the messages. Templates call this function."""
    raise TemplateRefusal(message)


@functools.lru_cache(maxsize=8)
def compiled(source: str) -> jinja2.Template:
    return environment().from_string(source)


def render(source: str, variables: dict[str, Any], max_characters: int) -> str:
    """Renders a template.

    Args:
        source: The template's source.
        variables: The template's variables, including `messages` in OpenAI's format.
        max_characters: The maximum number of characters of the result.

    Raises:
        OutputTooLong: If the text is longer than `max_characters`.
        TemplateRefusal: If the template rejects the messages.
        Exception: Any exception that the template raises.
    """
    context = {**variables, "messages": [readable(each) for each in variables["messages"]]}
    parts: list[str] = []
    length = 0
    for part in compiled(source).generate(**context):
        length += len(part)
        if length > max_characters:
            raise OutputTooLong
        parts.append(part)
    return "".join(parts)


def readable(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message with a content, and with arguments as a `ToolArguments`."""
    content, calls = message.get("content"), message.get("tool_calls")
    # With tool calls, some clients send an empty string instead of null.
    absent = content is None or (content == "" and calls)
    made = {**message, "content": AbsentContent() if absent else content}
    if isinstance(calls, list):
        made["tool_calls"] = [_readable_call(call) for call in calls]
    return made


def _readable_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    readable_call = dict(call)
    if isinstance(call.get("function"), dict):
        readable_call["function"] = _readable_call(call["function"])
    arguments = call.get("arguments")
    if isinstance(arguments, dict):
        readable_call["arguments"] = ToolArguments(arguments, to_json(arguments))
    elif isinstance(arguments, str):
        try:
            values = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return readable_call
        if isinstance(values, dict):
            readable_call["arguments"] = ToolArguments(values, arguments)
    return readable_call


def answer(request: dict[str, Any]) -> dict[str, str]:
    """Returns the text under "text", or the reason of an error under "failed" or "refused"."""
    try:
        return {"text": render(request["source"], request["variables"], request["most"])}
    except OutputTooLong:
        return {"failed": f"wrote more than {request['most']:,} characters"}
    except MemoryError:
        raise
    except jinja2.TemplateSyntaxError as error:
        return {"failed": f"has an error on line {error.lineno}: {_cut(error.message)}"}
    except TemplateRefusal as error:
        return {"refused": _cut(str(error))}
    except Exception as error:  # the template may raise any exception
        return {"failed": f"raised {type(error).__name__}: {_cut(str(error))}"}


def _cut(message: str | None) -> str:
    """Shortens an error message, which may contain parts of the chat or of the template."""
    return (message or "")[:MOST_SAID]


def packed(message: object) -> bytes:
    """Encodes a message with its length.

    Raises:
        TypeError, ValueError, RecursionError: If the message is not a JSON value.
    """
    body = json.dumps(message).encode("ascii")
    return len(body).to_bytes(LENGTH_BYTES) + body


def receive(stream: IO[bytes]) -> Any:
    """Reads the next message; returns None at the end of the stream."""
    head = stream.read(LENGTH_BYTES)
    length = int.from_bytes(head)
    body = stream.read(length)
    return json.loads(body) if len(head) == LENGTH_BYTES and len(body) == length else None


def send(stream: IO[bytes], data: bytes) -> None:
    stream.write(data)
    stream.flush()


def limit(max_bytes: int) -> Callable[[float], None]:
    """Limits the memory of this process, and returns a function that starts its timer; 0 stops it.

    The timer ends a process whose parent has died. If the system has no timers, only the parent can
    end the process.
    """
    try:
        import resource
        import signal
    except ImportError:  # Windows
        return lambda seconds: None
    try:
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ValueError, OSError):
        pass  # macOS has the limit but refuses to set it
    # The default action ends the process even within a C call.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def clock(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)

    return clock


def main(max_bytes: int, seconds: float) -> None:
    """Serves requests until stdin ends."""
    clock = limit(max_bytes)
    environment()
    send(sys.stdout.buffer, packed("ready"))
    while (request := receive(sys.stdin.buffer)) is not None:
        clock(seconds)
        reply = answer(request)
        clock(0)
        send(sys.stdout.buffer, packed(reply))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
