"""gpt-oss' harmony format: messages of several parts, each with a channel and maybe a recipient."""

import re
import secrets
from collections.abc import Generator

from jaxattn.server.decoding.message_events import (
    ContentDelta,
    MessageEvent,
    ReasoningDelta,
    ToolCall,
)
from jaxattn.server.decoding.tool_formats.lossless_json import object_text
from jaxattn.server.decoding.tool_formats.text_cursor import (
    MarkSet,
    Scan,
    TextCursor,
    Unreadable,
)
from jaxattn.server.decoding.tool_formats.tool_format import CallFrame, ToolSchemas

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN = "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
CHANNELS = ("analysis", "commentary", "final")
MOST_HEADER = 512  # characters
_CHANNEL = re.compile("|".join(CHANNELS))
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
_OTHER_RECIPIENT = re.compile(r"to=(?!assistant\b)\S")
_PARTS = MarkSet((START, CHANNEL, *ENDS))


class HarmonyFormat:
    """The format <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>"""

    name = "harmony"
    visible_tokens = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
    frame = CallFrame(
        call_begin=f"{CHANNEL}commentary to=functions.NAME {CONSTRAIN}json{MESSAGE}",
        call_end="",
        separator=None,
    )


class HarmonyParser:
    """A `MessageParser` for harmony.

    The analysis channel is reasoning. A part whose recipient is a function is a tool call.

    Args:
        tools: The tools that the model may call; None leaves calls as text.
        parallel: Whether to return more than one call.
    """

    def __init__(self, tools: ToolSchemas | None, *, parallel: bool = True):
        self._tools, self._parallel = tools, parallel
        self._cursor = TextCursor()
        self._calls, self._open_kind = 0, ""
        self._reading = self._parts()

    def feed(self, text: str) -> list[MessageEvent]:
        # Within a part, text without the first character of a mark is certain.
        if self._open_kind and "<" not in text and not self._cursor.text:
            return [_delta(self._open_kind, text)] if text else []
        return self._events() if self._cursor.feed(text) else []

    def finish(self) -> list[MessageEvent]:
        self._cursor.ended = True
        return self._events()

    def _events(self) -> list[MessageEvent]:
        found: list[MessageEvent] = []
        for event in self._reading:
            if event is None:
                break
            found.append(event)
        return found

    def _parts(self) -> Generator[MessageEvent | None, None, None]:
        cursor, before = self._cursor, ""
        while True:
            if before or self._calls:
                yield from cursor.space()
            while not cursor.text:
                if cursor.ended:
                    return
                yield None
            if (yield from cursor.one_of(*ENDS)) is not None:  # a part without text
                continue
            cursor.commit()
            try:
                header = yield from self._header()
                call = _RECIPIENT.search(header)
                if call and self._tools is not None:
                    event = yield from self._call(call[1])
                    if self._parallel or not self._calls:
                        self._calls += 1
                        yield event
                    continue
                if call:
                    raise Unreadable
                kind = _kind(header)
            except Unreadable:
                cursor.rewind()
                if begin := (yield from cursor.one_of(START, CHANNEL)):
                    yield ContentDelta(begin)
                kind = "content"
            if kind == before == "reasoning":
                yield ReasoningDelta("\n")
            before = kind
            yield from self._streamed(kind)

    def _header(self) -> Scan[str]:
        """Reads the header of a part, up to its text.

        Raises:
            Unreadable: If no part begins here.
        """
        cursor = self._cursor
        begin = yield from cursor.one_of(START, CHANNEL, *CHANNELS)
        if begin is None:
            raise Unreadable
        header = begin
        if begin in CHANNELS:  # the mark before it is missing
            space = yield from cursor.space()
            if (yield from cursor.one_of(MESSAGE)) is not None:
                return header
            yield from cursor.literal("to=functions.")
            header += f"{space}to=functions."
        text, mark = yield from cursor.until(MESSAGE, *ENDS)
        header += text
        if mark != MESSAGE or len(header) > MOST_HEADER or not _CHANNEL.search(header):
            raise Unreadable
        return header

    def _call(self, name: str) -> Scan[ToolCall]:
        cursor = self._cursor
        yield from cursor.space()
        arguments = "{}"
        if cursor.text and not any(end.startswith(cursor.text[:2]) for end in ENDS):
            arguments = object_text((yield from cursor.json()))
        yield from cursor.space()
        if (yield from cursor.one_of(*ENDS)) is None and cursor.text:
            raise Unreadable
        return ToolCall(self._calls, f"call_{secrets.token_hex(12)}", name, arguments)

    def _streamed(self, kind: str) -> Generator[MessageEvent | None, None, None]:
        """Yields the text of a part as it arrives."""
        cursor = self._cursor
        while True:
            match = _PARTS.pattern.search(cursor.text)
            kept = 0 if match or cursor.ended else _PARTS.begun(cursor.text)
            end = match.start() if match else len(cursor.text) - kept
            text = cursor.take(end)
            cursor.commit()
            self._open_kind = "" if match else kind
            if text:
                yield _delta(kind, text)
            if match:
                yield from cursor.one_of(*ENDS)
                return
            if cursor.ended:
                return
            yield None


def _kind(header: str) -> str:
    """Returns the kind of a part without a call. Messages to built-in tools count as reasoning."""
    match = _CHANNEL.search(header)
    analysis = match is not None and match[0] == "analysis"
    return "reasoning" if analysis or _OTHER_RECIPIENT.search(header) else "content"


def _delta(kind: str, text: str) -> MessageEvent:
    return ReasoningDelta(text) if kind == "reasoning" else ContentDelta(text)
