"""Readers of calls in JSON objects with a name and arguments: Hermes', Llama's and Mistral's."""

from jaxattn.server.decoding.tool_formats import lossless_json
from jaxattn.server.decoding.tool_formats.text_cursor import Scan, TextCursor, Unreadable
from jaxattn.server.decoding.tool_formats.tool_format import CallDraft, ToolSchemas


def declared_name(cursor: TextCursor, begin: str, tools: ToolSchemas) -> Scan[None]:
    """Checks that a mark and a tool's name come next, without consuming them.

    Text that only resembles a call, such as JSON about a person, fails at its next quote.

    Raises:
        Unreadable: If no tool has this name.
    """
    yield from cursor.literal(begin)
    name, mark = yield from cursor.until('"')
    if name not in tools:
        raise Unreadable
    cursor.text = begin + name + mark + cursor.text


def draft(text: str) -> CallDraft:
    """Returns the call in a JSON object with "name" and "arguments", or Llama's "parameters".

    Raises:
        Unreadable: If the text is not such an object.
    """
    given = lossless_json.members(text)
    keys = [key for key in ("arguments", "parameters") if key in given]
    if "name" not in given or len(keys) > 1:
        raise Unreadable
    name, id, arguments = given["name"].string, given.get("id"), "{}"
    if keys:
        value = given[keys[0]]
        arguments = value.text
        if isinstance(value.value, str):  # some models write the object as a string
            arguments = lossless_json.compacted(lossless_json.object_text(value.string))
        elif not isinstance(value.value, dict):
            raise Unreadable
    if not name:
        raise Unreadable
    given_id = id.string if id is not None and id.text.startswith('"') else None
    return CallDraft(name, arguments, given_id or None)
