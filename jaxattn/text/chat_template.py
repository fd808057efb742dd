"""Chat templates: which one of a folder is taken, and what it is given."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxattn.text.json_files import TextError
from jaxattn.text.renderer_process import TemplateRenderer
from jaxattn.text.tokenizer_config import TemplateFile, TokenizerConfig

# Names of the thoughts in a message; the first that has a text counts.
REASONING = ("reasoning_content", "thinking", "reasoning")
TEXT_PARTS = ("text", "input_text", "output_text")
FINAL = "\u2063<the content of the last message ends here>\u2063"  # for `continue_final_message`


class ChatTemplate:
    """The templates of a folder, rendered in a process of their own (`TemplateRenderer`)."""

    def __init__(self, settings: TokenizerConfig, renderer: TemplateRenderer | None = None):
        self._templates = settings.templates
        self._folder = settings.folder
        self._special: dict[str, Any] = dict(settings.named)
        if settings.more:
            self._special["additional_special_tokens"] = list(settings.more)
        self._renderer = renderer or TemplateRenderer()

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self._templates)

    @property
    def source(self) -> str:
        """The templates' text, one after another."""
        return "\n".join(template.source for template in self._templates.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The text of a conversation, special tokens included.

        Args:
            continue_final_message: it ends with the last message's content, which goes on.

        Raises:
            TextError: as `Tokenizer.chat` does.
        """
        template = self.choose(bool(tools))
        flat = flattened(messages)
        if continue_final_message:
            flat[-1]["content"] = (flat[-1].get("content") or "") + FINAL
        given = {
            "documents": None,
            **self._special,
            **variables,
            "messages": known_roles(flat, template.source),
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._renderer.render(template.source, given, str(template.path))
        return _up_to_final(text) if continue_final_message else text

    def choose(self, tools: bool) -> TemplateFile:
        """The template "tool_use" where there are tools and it is there; else "default".

        Raises:
            TextError: there is neither.
        """
        names = ["tool_use", "default"] if tools else ["default"]
        for name in names:
            if name in self._templates:
                return self._templates[name]
        if not self._templates:
            raise TextError(
                f"{self._folder} has no chat template: add chat_template.jinja, or give plain text"
            )
        raise TextError(
            f"{self._folder} has chat templates named {', '.join(sorted(self._templates))}, and "
            f"none of them is {' or '.join(names)}"
        )


def _up_to_final(text: str) -> str:
    """The text of a conversation up to the end of its last message's content."""
    before, found, _ = text.rpartition(FINAL)
    if not found:
        raise TextError(
            "continue_final_message: the chat template does not write the last message's content; "
            "leave continue_final_message out"
        )
    return before


def flattened(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages without null fields, with lists of text parts joined and thoughts named alike.

    transformers 5.24 hands messages to templates in this form.

    Raises:
        TextError: one has no role, or a content that is no text.
    """
    if not messages:
        raise TextError("a chat needs at least one message")
    return [_flattened(place, message) for place, message in enumerate(messages)]


def _flattened(place: int, message: Mapping[str, Any]) -> dict[str, Any]:
    where = f"messages[{place}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TextError(f"{where} must be an object with a text `role`")
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "".join(_part(where, part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise TextError(
            f"{where}.content must be a text, a list of parts or null; got {type(content).__name__}"
        )
    # Clients send null for what is missing, which templates take for a value.
    given = {key: value for key, value in message.items() if value is not None}
    thoughts = next((given[key] for key in REASONING if isinstance(given.get(key), str)), None)
    if thoughts is not None:
        given = {"thinking": thoughts, **given, "reasoning_content": thoughts}
    return {**given, "content": content}


def known_roles(messages: Sequence[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """The messages, with system for the role developer where a template does not know that one.

    The newer role replaces system in OpenAI's API. Where both stand in front they become one
    message, since many templates take only one.
    """
    if "developer" in template:
        return list(messages)
    found: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "developer":
            message = {**message, "role": "system"}
            if len(found) == 1 and found[0]["role"] == "system":
                texts = [each["content"] for each in (found.pop(), message) if each["content"]]
                message["content"] = "\n\n".join(texts)
        found.append(message)
    return found


def _part(where: str, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind not in TEXT_PARTS or not isinstance(text, str):
        raise TextError(
            f"{where}.content has a part of the type {kind!r}; a model of text takes parts "
            '{"type": "text", "text": …} only'
        )
    return text
