"""The tools of a request, and the restriction of the model's tool calls."""

import dataclasses
from typing import Any, Literal

from jaxattn.server.http.errors import bad
from jaxattn.server.http.json_fields import JsonFields

MOST_TOOLS = 128
MODES = ("none", "auto", "required")
MOST_NAME = 128  # characters

type Tool = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """The tools that the model sees, and those that it may or must call.

    Attributes:
        tools: The tools that the template shows to the model, in the format of Chat Completions.
        functions: The tools that the model may call.
        mode: "required" if the model must call one of them, otherwise "auto".
        names_function: Whether the request names a single function.
        parallel: Whether a message may contain several calls.
        repeated: Whether a required call may be followed by others. The request must ask for this
            explicitly, because an uncertain model would generate calls without end.
    """

    tools: tuple[Tool, ...] = ()
    functions: tuple[Tool, ...] = ()
    mode: Literal["auto", "required"] = "auto"
    names_function: bool = False
    parallel: bool = True
    repeated: bool = False


def read_tools(fields: JsonFields) -> ToolChoice:
    """Reads the fields `tools`, `tool_choice` and `parallel_tool_calls` of Chat Completions.

    Raises:
        ApiError: 400 if a tool is not a function, or the choice names a tool that does not exist.
    """
    tools = fields.objects("tools", MOST_TOOLS)
    names: list[str] = []
    for place, tool in enumerate(tools):
        function = JsonFields(tool, f"tools[{place}]").object("function")
        name = function.text("name", MOST_NAME)
        if tool.get("type", "function") != "function" or not name:
            raise bad("tools", f"tools[{place}] must be a function with a name")
        if name in names:
            raise bad(
                "tools",
                f"tools[{place}] has the same name as an earlier tool, {name!r}; rename one",
            )
        function.object("parameters")
        names.append(name)
    parallel = fields.flag("parallel_tool_calls", True)
    choice = fields.values.get("tool_choice")
    if choice == "none":
        return ToolChoice()
    if choice is not None and choice not in MODES and not isinstance(choice, dict):
        raise fields.wrong("tool_choice", "none, auto, required or an object that names a tool")
    if choice not in (None, "auto") and not tools:
        raise bad("tool_choice", "tool_choice needs tools; give some, or leave it out")
    mode, allowed, names_function = "auto", names, False
    if choice == "required":
        mode = "required"
    elif isinstance(choice, dict):
        mode, allowed, names_function = _named(fields, names)
    functions = tuple(tool for tool in tools if tool["function"]["name"] in allowed)
    return ToolChoice(
        tools=tuple(tools),
        functions=functions,
        mode="required" if mode == "required" else "auto",
        names_function=names_function,
        parallel=parallel and not names_function,
        repeated=parallel and not names_function and fields.given("parallel_tool_calls"),
    )


def _named(fields: JsonFields, names: list[str]) -> tuple[str, list[str], bool]:
    """Returns the mode, the functions that the model may call, and whether the choice names one."""
    choice = fields.object("tool_choice")
    if choice.values.get("type") == "allowed_tools":
        # Chat Completions nests the fields; Responses does not.
        nested = choice.given("allowed_tools")
        given = choice.object("allowed_tools") if nested else choice
        mode = given.chosen("mode", ("auto", "required")) or "auto"
        tools = given.objects("tools", MOST_TOOLS)
        if not tools:
            raise given.wrong("tools", "a list of at least one tool")
        tool_fields = [
            JsonFields(each, f"{given.name('tools')}[{n}]") for n, each in enumerate(tools)
        ]
        return mode, [_known(place, names) for place in tool_fields], False
    return "required", [_known(choice, names)], True


def _known(choice: JsonFields, names: list[str]) -> str:
    """Returns the name in {"function": {"name"}} or {"name"}, which must be in `names`."""
    given = choice.object("function") if choice.given("function") else choice
    name = given.text("name", MOST_NAME)
    if name not in names:
        raise bad("tool_choice", f"tool_choice must name one of the tools {names}; got {name!r}")
    return name
