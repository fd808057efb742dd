"""The Lark grammar of a whole answer: the reasoning, then the output that the request asks for."""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxattn.server.decoding.grammars.schema_translation import schema_text
from jaxattn.server.decoding.message_format import MessageFormat
from jaxattn.server.decoding.tool_choice import ToolChoice
from jaxattn.server.decoding.tool_formats.harmony import CHANNEL, MESSAGE, START, HarmonyFormat

ANY_TEXT = r"/(?s:.*)/"
SPACE = r"/[ \n]{0,4}/"  # between reasoning and answer
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)


class AnswerGrammar:
    """A writer of grammars for a model's tokens and message format.

    Args:
        special_tokens: A map from id to text of the special tokens. A grammar refers to them by id,
            because their spelled-out text consists of other tokens.
        format_: The message format; None for an answer without reasoning and calls.
        prompt_end: The end of the prompt's text, which shows whether the reasoning is open.
    """

    def __init__(
        self,
        special_tokens: Mapping[int, str],
        format_: MessageFormat | None = None,
        prompt_end: str = "",
    ):
        self._special_tokens = special_tokens
        self._format, self._prompt_end = format_, prompt_end

    @functools.cached_property
    def _ids(self) -> Mapping[str, int]:
        """The ids of special tokens by text, computed lazily: most requests need no grammar."""
        return {text: id for id, text in self._special_tokens.items() if text}

    @functools.cached_property
    def _special(self) -> re.Pattern[str]:
        longest_first = sorted(self._ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "$^")

    def pattern(self, pattern: str) -> str:
        """Returns the grammar of an answer that a regular expression matches entirely."""
        escaped = _SLASH.sub(lambda match: match[1] or r"\/", pattern).replace("\n", r"\n")
        return self._answer(f"answer: /{escaped}/")

    def choices(self, texts: Sequence[str]) -> str:
        """Returns the grammar of an answer that is one of some texts."""
        literals = (json.dumps(text, ensure_ascii=False) for text in texts)
        return self._answer(f"answer: {' | '.join(literals)}")

    def schema(self, schema: Mapping[str, Any], param: str) -> str:
        """Returns the grammar of an answer that is JSON according to a schema."""
        return self._answer(f"answer: %json {schema_text(schema, param)}")

    def calls(self, choice: ToolChoice) -> str:
        """Returns the grammar of an answer of tool calls in the model's format.

        Each tool's parameters have a separate schema, and `$ref` refers to this schema's root.
        """
        assert self._format is not None
        frame, rules, names = self._format.style.frame, list[str](), list[str]()
        for place, tool in enumerate(choice.functions):
            function = tool["function"]
            schema = {"type": "object", **(function.get("parameters") or {})}
            before, after = (
                self._literal(text.replace("NAME", _in_json(function["name"])))
                for text in (frame.call_begin, frame.call_end)
            )
            rules += [
                f"call_{place}: {before} arguments_{place} {after}",
                f"arguments_{place}: %json {schema_text(schema, 'tools')}",
            ]
            names.append(f"call_{place}")
        begin, end = self._literal(frame.begin), self._literal(frame.end)
        more = ""
        if choice.repeated and frame.separator is not None:
            more = f"({self._literal(frame.separator)} call)*"
        rules += [f"answer: {begin} call {more} {end}", f"call: {' | '.join(names)}"]
        return self._answer("\n".join(rules), for_tool_calls=True)

    def _answer(self, rules: str, *, for_tool_calls: bool = False) -> str:
        """Returns the grammar of the reasoning followed by the rules of `answer`."""
        format_ = self._format
        if format_ is None:
            return f"start: answer\n{rules}\n"
        if isinstance(format_.style, HarmonyFormat):
            final = "" if for_tool_calls else self._literal(f"{CHANNEL}final{MESSAGE}")
            begin = self._literal(f"{CHANNEL}analysis{MESSAGE}")
            thoughts = self._reasoning_rule(f"<|end|>{START}assistant")
            return f"start: {begin} thoughts {final} answer\n{thoughts}\n{rules}\n"
        begin, end = format_.thoughts
        if format_.opened(self._prompt_end):
            first = "thoughts"
        elif format_.thinks and not format_.closed(self._prompt_end):
            first = f'("\\n"? {self._literal(begin)} thoughts)?'
        else:
            return f"start: answer\n{rules}\n"
        return f"start: {first} answer\n{self._reasoning_rule(end, SPACE)}\n{rules}\n"

    def _reasoning_rule(self, end: str, space: str = "") -> str:
        """Returns the rule for any text up to an end mark, and white space after it."""
        if self._special.match(end):
            return f"thoughts: {ANY_TEXT} {self._literal(end)} {space}"
        return f"thoughts: inner {space}\ninner[suffix={json.dumps(end)}]: {ANY_TEXT}"

    def _literal(self, text: str) -> str:
        """Returns a text with special tokens as ids. INDEX in the text stands for any number."""
        parts: list[str] = []
        at = 0
        for match in self._special.finditer(text):
            parts += [*self._strings(text[at : match.start()]), f"<[{self._ids[match[0]]}]>"]
            at = match.end()
        return " ".join([*parts, *self._strings(text[at:])])

    @staticmethod
    def _strings(text: str) -> Sequence[str]:
        between = " /[0-9]{1,3}/ ".join(
            json.dumps(each, ensure_ascii=False) if each else "" for each in text.split("INDEX")
        )
        return [between] if between.strip() else []


def _in_json(name: str) -> str:
    """Returns a function's name, escaped for a JSON string."""
    return json.dumps(name, ensure_ascii=False)[1:-1]
