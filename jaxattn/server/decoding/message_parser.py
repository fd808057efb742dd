"""The parser of messages with tagged reasoning and tool calls in one of the tool formats.

The reasoning comes first: either the template has opened it, or the message begins with its tag.
Everything inside the tags is reasoning, including tool calls. The text after them is content,
except for complete tool calls.
"""

import re
import secrets
from collections.abc import Callable

from jaxattn.server.decoding.message_events import (
    ContentDelta,
    MessageEvent,
    ReasoningDelta,
    ToolCall,
)
from jaxattn.server.decoding.tool_formats.text_cursor import MarkSet, TextCursor, Unreadable
from jaxattn.server.decoding.tool_formats.tool_format import (
    CallDraft,
    Reading,
    ToolFormat,
    ToolSchemas,
)

MOST_FAILURES = 64  # of call readers after the last piece; each rereads the rest of the text


class TaggedMessageParser:
    """A `MessageParser` for tagged reasoning and one format of tool calls.

    Args:
        format_: The format of the tool calls.
        tools: The tools that the model may call; None leaves calls as text.
        thoughts: The tags before and after the reasoning.
        opened: Whether the prompt has opened the reasoning.
        parallel: Whether to return more than one call.
    """

    def __init__(
        self,
        format_: ToolFormat,
        tools: ToolSchemas | None,
        thoughts: tuple[str, str],
        *,
        opened: bool = False,
        parallel: bool = True,
    ):
        self._format, self._parallel = format_, parallel
        self._tools = tools if tools is not None else ToolSchemas({})
        self._begin, self._end = thoughts[0], MarkSet((thoughts[1],))
        self._cursor = TextCursor()
        self._reading: Reading | None = None
        self._calls: list[ToolCall] = []
        self._failures = 0
        self._call_begins = self._starts = None
        if tools is not None:
            self._call_begins = MarkSet(format_.begins(self._tools))
            if starts := format_.starts(self._tools):
                self._starts = MarkSet(starts)
        first = {mark[0] for mark in format_.begins(self._tools)} if tools is not None else set()
        # Within content, text that does not match is certain: no call begins in it.
        self._uncertain = re.compile(f"[{re.escape(''.join(first))}]|\\s\\Z" if first else "$^")
        self._only_whitespace = True  # this state has seen only white space
        self._state: Callable[[list[MessageEvent]], bool] = self._parse_start
        self._opened = opened
        if opened:
            self._state = self._parse_reasoning

    def feed(self, text: str) -> list[MessageEvent]:
        cursor, reading = self._cursor, self._reading
        if reading is not None:
            found: list[MessageEvent] = []
            more = cursor.feed(text) and self._parse_call(reading, found)
            return self._events(found) if more else found
        if not self._only_whitespace and not cursor.text and text:
            if self._state == self._parse_content:
                if not self._uncertain.search(text):
                    return [ContentDelta(text)]
            elif self._end.first_character not in text and not text[-1].isspace():
                return [ReasoningDelta(text)]
        cursor.feed(text)
        return self._events([])

    def finish(self) -> list[MessageEvent]:
        self._cursor.ended = True
        return self._events([])

    def _events(self, events: list[MessageEvent]) -> list[MessageEvent]:
        while self._state(events):
            pass
        return events

    # Each state consumes text, adds events, and returns whether to call the next state at once.

    def _parse_start(self, events: list[MessageEvent]) -> bool:
        """The state before the first character, which decides whether reasoning begins."""
        cursor = self._cursor
        text = cursor.text.lstrip()
        if text.startswith(self._begin):
            cursor.text = text[len(self._begin) :]
            cursor.commit()
            self._state = self._parse_reasoning
            return True
        if self._begin.startswith(text) and not cursor.ended:
            return False
        self._state = self._parse_content
        return True

    def _parse_reasoning(self, events: list[MessageEvent]) -> bool:
        cursor = self._cursor
        if self._only_whitespace:
            cursor.text = cursor.text.lstrip()
            if self._opened and cursor.text.startswith(self._begin):  # the model repeats the tag
                cursor.text = cursor.text[len(self._begin) :].lstrip()
                self._opened = False
            elif self._opened and self._begin.startswith(cursor.text) and not cursor.ended:
                return False
            self._only_whitespace = not cursor.text
        if match := self._end.pattern.search(cursor.text):
            _emit(events, ReasoningDelta(cursor.take(match.start()).rstrip()))
            cursor.take(len(match[0]))
            self._state, self._only_whitespace = self._after_thoughts, True
            cursor.commit()
            return True
        if cursor.ended:
            _emit(events, ReasoningDelta(cursor.take(len(cursor.text)).rstrip()))
            return False
        final_length = len(cursor.text) - self._end.begun(cursor.text)
        final_length = len(cursor.text[:final_length].rstrip())
        _emit(events, ReasoningDelta(cursor.take(final_length)))
        cursor.commit()
        return False

    def _after_thoughts(self, events: list[MessageEvent]) -> bool:
        cursor = self._cursor
        cursor.text = cursor.text.lstrip()
        cursor.commit()
        if not cursor.text:
            return False
        self._state = self._parse_content
        return True

    def _parse_content(self, events: list[MessageEvent]) -> bool:
        """The state of content, which stops at the possible beginning of a call."""
        cursor = self._cursor
        if self._reading is not None:
            return self._parse_call(self._reading, events)
        cursor.commit()
        text = cursor.text
        if self._only_whitespace and self._starts and (bare := text.lstrip()):
            if self._starts.pattern.match(bare):
                cursor.text = bare
                self._reading = self._format.read(cursor, self._tools)
                return True
            if self._starts.begun(bare) == len(bare) and not cursor.ended:
                return False
        if self._call_begins and (match := self._call_begins.pattern.search(text)):
            self._emit(events, cursor.take(len(text[: match.start()].rstrip())))
            cursor.commit()
            cursor.take(match.start() - len(text) + len(cursor.text))
            self._reading = self._format.read(cursor, self._tools)
            return True
        if cursor.ended or self._call_begins is None:
            if text.strip() or not self._calls:
                self._emit(events, text)
            cursor.take(len(text))
            cursor.commit()
            return False
        final_length = len(text) - self._call_begins.begun(text)
        self._emit(events, cursor.take(len(text[:final_length].rstrip())))
        cursor.commit()
        return False

    def _parse_call(self, reading: Reading, events: list[MessageEvent]) -> bool:
        """The state within a call. Text that turns out not to be a call is content."""
        cursor = self._cursor
        try:
            draft = next(reading)
        except StopIteration:
            self._reading = None
            return True
        except Unreadable:
            self._reading = None
            cursor.rewind()
            self._failures += cursor.ended
            self._emit(events, cursor.take(self._mark_length(cursor.text)))
            cursor.commit()
            if self._failures > MOST_FAILURES:
                self._call_begins = self._starts = None
            return True
        if draft is None:
            return False
        cursor.commit()
        self._only_whitespace = False
        if self._parallel or not self._calls:
            events.append(self._called(draft))
        return True

    def _mark_length(self, text: str) -> int:
        """Returns the number of characters up to the end of the first mark."""
        found = (marks.pattern.search(text) for marks in (self._call_begins, self._starts) if marks)
        return min((match.end() for match in found if match), default=1)

    def _called(self, draft: CallDraft) -> ToolCall:
        index, taken = len(self._calls), {call.id for call in self._calls}
        id = draft.id or self._format.id(draft.name, index)
        if id in taken:
            id = self._format.id(draft.name, index)
        if id in taken:
            id = f"call_{secrets.token_hex(12)}"
        self._calls.append(ToolCall(index, id, draft.name, draft.arguments))
        return self._calls[-1]

    def _emit(self, events: list[MessageEvent], text: str) -> None:
        if text:
            self._only_whitespace = self._only_whitespace and not text.strip()
            _emit(events, ContentDelta(text))


def _emit(events: list[MessageEvent], event: ReasoningDelta | ContentDelta) -> None:
    """Adds an event, or extends the last one if it is of the same kind."""
    if not event.text:
        return
    if events and type(events[-1]) is type(event):
        event = type(event)(events.pop().text + event.text)  # type: ignore[union-attr]
    events.append(event)
