"""The styled text of an answer in the terminal, with dim reasoning."""

from collections.abc import Iterable, Sequence

from jaxattn.server.decoding.message_events import (
    ContentDelta,
    MessageEvent,
    MessageParts,
    ReasoningDelta,
)
from jaxattn.server.decoding.message_format import MessageFormat
from jaxattn.server.decoding.tool_choice import ToolChoice
from jaxattn.text import Tokenizer

THOUGHTS = "dim"
PROMPT_END = 32  # tokens; no template adds more after the last message


class MessageText:
    """The incremental text of one chat answer, in pieces of (text, style).

    Reasoning is dim and appears between its tags, even if the template wrote the first tag.

    Args:
        tokenizer: The model's tokenizer.
        prompt: The tokens of the conversation, which may end within the reasoning.

    Attributes:
        parts: The reasoning and content so far.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        format_, choice = MessageFormat.of(tokenizer.chat_template), ToolChoice()
        end = tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False)
        self.parts, self._tags = MessageParts(), format_.thoughts
        self._stream = tokenizer.stream(shown=format_.shown(choice))
        self._parser = format_.parser(choice, end)
        self._thinking = False

    def push(self, token: int) -> list[tuple[str, str | None]]:
        return self._pieces(self._parser.feed(self._stream.push(token)))

    def end(self) -> list[tuple[str, str | None]]:
        """Returns the remaining pieces after the last token."""
        rest = self._parser.feed(self._stream.end())
        return self._pieces([*rest, *self._parser.finish()])

    @property
    def message(self) -> dict[str, str]:
        """The answer as a message for the history."""
        found = {"role": "assistant", "content": self.parts.content}
        thoughts = self.parts.reasoning
        return found | ({"reasoning_content": thoughts} if thoughts else {})

    def _pieces(self, events: Iterable[MessageEvent]) -> list[tuple[str, str | None]]:
        found: list[tuple[str, str | None]] = []
        begin, end = self._tags
        for event in events:
            self.parts.add([event])
            if isinstance(event, ReasoningDelta):
                before = "" if self._thinking else f"{begin}\n"
                found.append((before + event.text, THOUGHTS))
                self._thinking = True
            elif isinstance(event, ContentDelta):
                if self._thinking:
                    found.append((f"\n{end}\n\n", THOUGHTS))
                found.append((event.text, None))
                self._thinking = False
        return found
