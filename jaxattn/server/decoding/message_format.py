"""The format of a model's messages, which the server recognizes from the chat template."""

import dataclasses

from jaxattn.server.decoding.message_events import MessageParser
from jaxattn.server.decoding.message_parser import TaggedMessageParser
from jaxattn.server.decoding.tool_choice import ToolChoice
from jaxattn.server.decoding.tool_formats.deepseek_kimi import (
    DeepSeekV3Format,
    DeepSeekV31Format,
    DsmlFormat,
    KimiFormat,
)
from jaxattn.server.decoding.tool_formats.harmony import HarmonyFormat, HarmonyParser
from jaxattn.server.decoding.tool_formats.hermes import HermesFormat
from jaxattn.server.decoding.tool_formats.llama import LlamaFormat
from jaxattn.server.decoding.tool_formats.mistral import MistralArrayFormat, MistralFormat
from jaxattn.server.decoding.tool_formats.qwen3_coder_glm import GlmFormat, QwenCoderFormat
from jaxattn.server.decoding.tool_formats.tool_format import ToolFormat, ToolSchemas

FORMATS: dict[str, ToolFormat | HarmonyFormat] = {
    each.name: each
    for each in (
        HermesFormat(),
        QwenCoderFormat(),
        GlmFormat(),
        DeepSeekV3Format(),
        DeepSeekV31Format(),
        DsmlFormat(),
        KimiFormat(),
        HarmonyFormat(),
        LlamaFormat(),
        MistralFormat(),
        MistralArrayFormat(),
    )
}
# (the strings that a template must all contain, the format). The first match counts.
SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>"), "harmony"),
    (("<|tool_call_begin|>",), "kimi_k2"),
    (("<|im_middle|>", "tool_declare"), "kimi_k2"),  # Kimi-K2's first template writes no calls
    (("｜DSML｜",), "deepseek_v32"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral"),
    (("[TOOL_CALLS]",), "mistral_array"),
    (("<arg_key>",), "glm"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama3"),
    (("<|start_header_id|>", '"parameters"'), "llama3"),
)
THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclasses.dataclass(frozen=True)
class MessageFormat:
    """The format in which a model writes its reasoning and its tool calls.

    Attributes:
        style: The format of tool calls, or of the whole message for harmony.
        thoughts: The tags before and after the reasoning.
        thinks: Whether the chat template contains the closing tag.
    """

    style: ToolFormat | HarmonyFormat
    thoughts: tuple[str, str]
    thinks: bool

    @classmethod
    def of(cls, template: str, tool_parser: str | None = None) -> "MessageFormat":
        """Returns the format of models with a chat template.

        Args:
            template: The template's source. If a model has several templates, all sources joined.
            tool_parser: The name of the tool-call format; None recognizes it from the template.
        """
        name = tool_parser or next(
            (name for signs, name in SIGNS if all(sign in template for sign in signs)), "hermes"
        )
        thoughts = next((tags for tags in THOUGHTS if tags[1] in template), THOUGHTS[0])
        return cls(FORMATS[name], thoughts, thoughts[1] in template)

    def shown(self, choice: ToolChoice) -> tuple[str, ...]:
        """Returns the special tokens that must stay in the text for the parser."""
        harmony = isinstance(self.style, HarmonyFormat)
        return (*self.thoughts, *(self.style.visible_tokens if choice.functions or harmony else ()))

    def opened(self, prompt_end: str) -> bool:
        """Whether the prompt ends with the opening tag of the reasoning."""
        return prompt_end.rstrip().endswith(self.thoughts[0])

    def closed(self, prompt_end: str) -> bool:
        """Whether the prompt ends with the closing tag of the reasoning, which may be empty."""
        return prompt_end.rstrip().endswith(self.thoughts[1])

    def parser(self, choice: ToolChoice, prompt_end: str = "") -> MessageParser:
        """Returns a parser for one choice's text.

        Args:
            prompt_end: The end of the prompt's text, including special tokens.
        """
        tools = ToolSchemas.of(choice.functions) if choice.functions else None
        if isinstance(self.style, HarmonyFormat):
            return HarmonyParser(tools, parallel=choice.parallel)
        return TaggedMessageParser(
            self.style,
            tools,
            self.thoughts,
            opened=self.opened(prompt_end),
            parallel=choice.parallel,
        )
