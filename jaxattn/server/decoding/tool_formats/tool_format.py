"""The interface of a format of tool calls."""

import abc
import dataclasses
import secrets
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from jaxattn.server.decoding.tool_formats.text_cursor import TextCursor


@dataclasses.dataclass(frozen=True, slots=True)
class CallDraft:
    """A call as a reader found it.

    Attributes:
        arguments: the text of a JSON object.
        id: that the model wrote; None leaves it to the server.
    """

    name: str
    arguments: str
    id: str | None = None


@dataclasses.dataclass(frozen=True)
class ToolSchemas:
    """The functions of a request: name -> JSON schema of the parameters."""

    parameters: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]]) -> "ToolSchemas":
        """The functions of Chat Completions' `tools`."""
        functions = [tool["function"] for tool in tools]
        return cls({each["name"]: each.get("parameters") or {} for each in functions})

    def __contains__(self, name: object) -> bool:
        return name in self.parameters

    def arguments(self, name: str) -> Mapping[str, Any]:
        """The schemas of a function's arguments; of none where it declares none."""
        properties = self.parameters.get(name, {}).get("properties")
        return properties if isinstance(properties, Mapping) else {}


# A reader yields None where it needs more text, and a call where it has read one.
type Reading = Generator[CallDraft | None, None, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallFrame:
    """The text around calls that a grammar forces; NAME stands for the function's.

    Attributes:
        begin, end: around all calls.
        before, after: around the arguments of each call.
        separator: between two calls; None allows one call only.
    """

    before: str
    after: str
    begin: str = ""
    separator: str | None = "\n"
    end: str = ""


class ToolFormat(abc.ABC):
    """One way to write calls.

    Attributes:
        name: of the option `--tool-parser`.
        frame: see `CallFrame`.
        shown: special tokens that a reader needs to see in the text.
    """

    name: str
    frame: CallFrame
    shown: tuple[str, ...] = ()

    @abc.abstractmethod
    def begins(self, tools: ToolSchemas) -> tuple[str, ...]:
        """The marks that a call may begin with, anywhere in the content."""

    def starts(self, tools: ToolSchemas) -> tuple[str, ...]:
        """Marks that begin a call where no content stands before them."""
        return ()

    @abc.abstractmethod
    def read(self, cursor: TextCursor, tools: ToolSchemas) -> Reading:
        """Reads calls from where one of the marks stands.

        Raises:
            Unreadable: what follows is no whole call.
        """

    def id(self, name: str, index: int) -> str:
        """The id of a call whose text has none."""
        return f"call_{secrets.token_hex(12)}"
