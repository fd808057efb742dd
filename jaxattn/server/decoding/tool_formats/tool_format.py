"""The interface of the formats of tool calls."""

import abc
import dataclasses
import secrets
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from jaxattn.server.decoding.tool_formats.text_cursor import TextCursor


@dataclasses.dataclass(frozen=True, slots=True)
class CallDraft:
    """A tool call as the reader returns it.

    Attributes:
        name: The function's name.
        arguments: The arguments as the text of a JSON object.
        id: The id that the model wrote; None if the server chooses it.
    """

    name: str
    arguments: str
    id: str | None = None


@dataclasses.dataclass(frozen=True)
class ToolSchemas:
    """The functions of a request.

    Attributes:
        parameters: A map from a function's name to the JSON schema of its parameters.
    """

    parameters: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]]) -> "ToolSchemas":
        """Returns the functions of the field `tools` of Chat Completions."""
        functions = [tool["function"] for tool in tools]
        return cls({each["name"]: each.get("parameters") or {} for each in functions})

    def __contains__(self, name: object) -> bool:
        return name in self.parameters

    def arguments(self, name: str) -> Mapping[str, Any]:
        """Returns the schemas of a function's arguments; empty if it declares none."""
        properties = self.parameters.get(name, {}).get("properties")
        return properties if isinstance(properties, Mapping) else {}


# A reader yields None when it needs more text, and each call that it has read.
type Reading = Generator[CallDraft | None, None, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallFrame:
    """The text around tool calls in a grammar. NAME stands for the function's name.

    Attributes:
        begin, end: The text before and after all calls.
        call_begin, call_end: The text before and after the arguments of each call.
        separator: The text between two calls; None allows only one call.
    """

    call_begin: str
    call_end: str
    begin: str = ""
    separator: str | None = "\n"
    end: str = ""


class ToolFormat(abc.ABC):
    """A format of tool calls.

    Attributes:
        name: The format's name for `--tool-parser`.
        frame: The text around the calls, for grammars.
        visible_tokens: The special tokens that must stay in the text for the reader.
    """

    name: str
    frame: CallFrame
    visible_tokens: tuple[str, ...] = ()

    @abc.abstractmethod
    def begins(self, tools: ToolSchemas) -> tuple[str, ...]:
        """Returns the marks that begin a call anywhere in the content."""

    def starts(self, tools: ToolSchemas) -> tuple[str, ...]:
        """Returns the marks that begin a call only at the beginning of the content."""
        return ()

    @abc.abstractmethod
    def read(self, cursor: TextCursor, tools: ToolSchemas) -> Reading:
        """Reads calls, beginning at one of the marks.

        Raises:
            Unreadable: If the text that follows is not a complete call.
        """

    def id(self, name: str, index: int) -> str:
        """Returns a new id for a call whose text has none."""
        return f"call_{secrets.token_hex(12)}"
