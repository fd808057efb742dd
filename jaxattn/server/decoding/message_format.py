"""The format in which a model writes its messages, recognised from its chat template."""

import dataclasses

from jaxattn.server.decoding.message_events import MessageParser
from jaxattn.server.decoding.message_parser import TaggedMessageParser
from jaxattn.server.decoding.tool_choice import ToolChoice
from jaxattn.server.decoding.tool_formats.deepseek_kimi import (
    DeepSeekV3Format,
    DeepSeekV31Format,
    KimiFormat,
)
from jaxattn.server.decoding.tool_formats.harmony import HarmonyFormat, HarmonyParser
from jaxattn.server.decoding.tool_formats.hermes import HermesFormat
from jaxattn.server.decoding.tool_formats.llama import LlamaFormat
from jaxattn.server.decoding.tool_formats.mistral import MistralArrayFormat, MistralFormat
from jaxattn.server.decoding.tool_formats.tagged_values import (
    DsmlFormat,
    GlmFormat,
    QwenCoderFormat,
)
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
# Marks that a template has, all of them -> the format; the first one that fits is taken.
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
    """How a model writes thoughts and calls.

    Attributes:
        style: of the calls; of the whole message in harmony.
        thoughts: the tags around them.
        thinks: whether the template knows these tags.
    """

    style: ToolFormat | HarmonyFormat
    thoughts: tuple[str, str]
    thinks: bool

    @classmethod
    def of(cls, template: str, tool_parser: str | None = None) -> "MessageFormat":
        """The format of a chat template's models.

        Args:
            template: its source; all sources, where a model has several.
            tool_parser: the name of the calls' format, where the template does not show it.
        """
        name = tool_parser or next(
            (name for signs, name in SIGNS if all(sign in template for sign in signs)), "hermes"
        )
        thoughts = next((tags for tags in THOUGHTS if tags[1] in template), THOUGHTS[0])
        return cls(FORMATS[name], thoughts, thoughts[1] in template)

    def shown(self, choice: ToolChoice) -> tuple[str, ...]:
        """Special tokens that the parser needs to see in the text."""
        harmony = isinstance(self.style, HarmonyFormat)
        return (*self.thoughts, *(self.style.shown if choice.functions or harmony else ()))

    def opened(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so leaves the thoughts open."""
        return prompt_end.rstrip().endswith(self.thoughts[0])

    def closed(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so has thoughts already, which may be empty."""
        return prompt_end.rstrip().endswith(self.thoughts[1])

    def parser(self, choice: ToolChoice, prompt_end: str = "") -> MessageParser:
        """A parser of one choice's text.

        Args:
            prompt_end: the end of the prompt, special tokens included.
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
