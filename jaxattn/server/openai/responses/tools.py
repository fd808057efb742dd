"""The tools and tool choices of the Responses API, translated to Chat Completions."""

from typing import Any

from jaxattn.server.decoding.tool_choice import MOST_NAME, MOST_TOOLS
from jaxattn.server.http.json_fields import JsonFields

FUNCTIONS = ("function", "custom")
CUSTOM = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class ResponseTools:
    """The functions and custom tools of a request, including those in namespaces.

    A custom tool becomes a function with one string argument.

    Args:
        fields: The request's fields.

    Attributes:
        tools: The tools in the format of Chat Completions.

    Raises:
        ApiError: 400 if a tool has no name.
    """

    def __init__(self, fields: JsonFields):
        self.tools: list[dict[str, Any]] = []
        self._kinds: dict[str, str] = {}
        # name in the chat -> namespace, name
        self._namespaced_names: dict[str, tuple[str, str]] = {}
        for place, tool in enumerate(fields.objects("tools", MOST_TOOLS)):
            reader = JsonFields(tool, f"tools[{place}]")
            if tool.get("type") == "namespace":
                namespace = reader.text("name", MOST_NAME) or ""
                for member in reader.objects("tools", MOST_TOOLS):
                    self._add(JsonFields(member, reader.name("tools")), namespace)
            else:
                self._add(reader, "")

    def _add(self, tool: JsonFields, space: str) -> None:
        kind = tool.values.get("type")
        if kind not in FUNCTIONS:
            return
        name = tool.text("name", MOST_NAME)
        if not name:
            raise tool.wrong("name", f"a string of 1 to {MOST_NAME} characters")
        own = f"{space}__{name}" if space and name in self._namespaced_names else name
        self._namespaced_names[own], self._kinds[own] = (space, name), str(kind)
        function: dict[str, Any] = {"name": own, "parameters": CUSTOM}
        if description := tool.text("description"):
            function["description"] = description
        if kind == "function":
            function["parameters"] = tool.object("parameters").values
            if strict := tool.flag("strict"):
                function["strict"] = strict
        self.tools.append({"type": "function", "function": function})

    def is_custom(self, name: str) -> bool:
        """Whether a tool is a custom tool, whose calls have a text instead of arguments."""
        return self._kinds.get(name) == "custom"

    def named(self, name: str) -> dict[str, str]:
        """Returns the field `name` of a model's call, and `namespace` if the tool has one."""
        space, own = self._namespaced_names.get(name, ("", name))
        return {"name": own, "namespace": space} if space else {"name": own}

    def in_chat(self, name: str, space: str | None) -> str:
        """Returns the name under which the model knows a tool."""
        found = (
            own for own, place in self._namespaced_names.items() if place == (space or "", name)
        )
        return next(found, name)


def read_tool_choice(fields: JsonFields) -> Any:
    choice = fields.values.get("tool_choice")
    if not isinstance(choice, dict):
        return fields.chosen("tool_choice", ("none", "auto", "required"))
    kind = choice.get("type")
    if kind in FUNCTIONS:
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind == "allowed_tools":
        allowed_fields = fields.object("tool_choice")
        tools = allowed_fields.objects("tools", MOST_TOOLS)
        named = [
            {"type": "function", "function": {"name": tool.get("name")}}
            for tool in tools
            if tool.get("type") in FUNCTIONS
        ]
        mode = allowed_fields.chosen("mode", ("auto", "required")) or "auto"
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    if not isinstance(kind, str):
        raise fields.wrong("tool_choice", "none, auto, required, or an object with a type")
    return "auto"  # the choice names a kind of tool that is skipped
