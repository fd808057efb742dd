"""Conversations for the templates in tests/data/chat.

The templates use the constructs of public ones: namespaces, macros, loop controls, slices, JSON
filters and tests for none.
"""

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "chat"
EXPECTED = DATA / "expected.json"
SPECIAL = {"bos_token": "<｜begin▁of▁text｜>", "eos_token": "<｜end▁of▁text｜>"}
NAMES = ("deepseek", "qwen", "kimi", "glm")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather in a <city> & around it; it's metric. 天气",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
ARGUMENTS = ['{"city": "Zürich & <b>", "days": 2, "units": ["°C", null]}', "{}"]


def _call(number: int) -> dict[str, Any]:
    function = {"name": "weather", "arguments": ARGUMENTS[number]}
    return {"id": f"functions.weather:{number}", "type": "function", "function": function}


PLAIN = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "1 < 2 & 'so' \"on\"?"},
    {"role": "assistant", "content": "<think>\neasy\n</think>\n\nYes. 是的"},
    {"role": "user", "content": "  Why? 🙂\n"},
]
CALLS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [_call(0), _call(1)]},
    {"role": "tool", "tool_call_id": "functions.weather:0", "content": "7 °C"},
    {"role": "tool", "tool_call_id": "functions.weather:1", "content": '{"rain": true}'},
]
THOUGHT = [
    {"role": "user", "content": "Go"},
    {"role": "assistant", "content": "I went", "reasoning_content": "\nshould I go?\n"},
]
_NOTHING = {"name": None, "refusal": None, "audio": None, "function_call": None}
# Messages of the OpenAI library as clients return them, with reasoning under OpenRouter's name.
NULLS = [
    {"role": "user", "content": "Go", "name": None},
    {**_NOTHING, "role": "assistant", "content": "I went", "reasoning": "Why?", "tool_calls": None},
    {"role": "user", "content": "And?"},
    {**_NOTHING, "role": "assistant", "content": None, "tool_calls": [_call(1)], "reasoning": "Hm"},
    {"role": "tool", "tool_call_id": "functions.weather:1", "content": "7", "name": None},
]

# (conversation, tools, add_generation_prompt, other variables of the template).
Case = tuple[list[dict[str, Any]], list[dict[str, Any]] | None, bool, dict[str, Any]]
CASES: dict[str, Case] = {
    "plain": (PLAIN, None, True, {}),
    "no prompt": (PLAIN, None, False, {}),
    "no thinking": (PLAIN, None, True, {"enable_thinking": False}),
    "tools": (PLAIN, TOOLS, True, {}),
    "calls": (CALLS, TOOLS, True, {}),
    "nulls": (NULLS, TOOLS, True, {}),
    "thought": (THOUGHT, None, False, {"enable_thinking": True}),
}


def as_authors_expect(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages in the form that a template's author expects.

    A call's arguments are a mapping, but text for DeepSeek. A missing content is empty text, but
    None for DeepSeek.
    """
    made = json.loads(json.dumps(messages))
    for message in made:
        if name != "deepseek" and message["content"] is None:
            message["content"] = ""
        for call in message.get("tool_calls") or ():
            if name != "deepseek":
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return made
