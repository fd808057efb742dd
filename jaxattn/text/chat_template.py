"""The chat templates of a folder: the choice of a template, and the variables that it gets."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxattn.text.json_files import TextError
from jaxattn.text.renderer_process import RendererProcess
from jaxattn.text.tokenizer_config import TemplateFile, TokenizerConfig

# The names of a message's reasoning. The first one that is a string counts.
REASONING = ("reasoning_content", "thinking", "reasoning")
TEXT_PARTS = ("text", "input_text", "output_text")
FINAL = "\u2063<the content of the last message ends here>\u2063"  # for `continue_final_message`


class ChatTemplate:
    """The templates of a folder, rendered in a separate process by a `RendererProcess`."""

    def __init__(self, settings: TokenizerConfig, renderer: RendererProcess | None = None):
        self._templates = settings.templates
        self._folder = settings.folder
        self._special: dict[str, Any] = dict(settings.special_tokens)
        if settings.additional_special_tokens:
            self._special["additional_special_tokens"] = list(settings.additional_special_tokens)
        self._renderer = renderer or RendererProcess()

    def __bool__(self) -> bool:
        """Whether the folder has a template."""
        return bool(self._templates)

    @property
    def source(self) -> str:
        """The sources of all templates, joined."""
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
        """Returns the text of a conversation, including special tokens.

        Args:
            continue_final_message: Whether the text ends with the last message's content, so that
                the model continues this message.

        Raises:
            TextError: See `Tokenizer.chat`.
        """
        template = self.choose(bool(tools))
        flat = flattened(messages)
        if continue_final_message:
            flat[-1]["content"] = (flat[-1].get("content") or "") + FINAL
        template_variables = {
            "documents": None,
            **self._special,
            **variables,
            "messages": known_roles(flat, template.source),
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._renderer.render(template.source, template_variables, str(template.path))
        return _up_to_final(text) if continue_final_message else text

    def choose(self, tools: bool) -> TemplateFile:
        """Returns the template "tool_use" if it exists and there are tools, otherwise "default".

        Raises:
            TextError: If neither exists.
        """
        names = ["tool_use", "default"] if tools else ["default"]
        for name in names:
            if name in self._templates:
                return self._templates[name]
        if not self._templates:
            raise TextError(
                f"{self._folder} has no chat template: add chat_template.jinja, or give a plain "
                "prompt"
            )
        raise TextError(
            f"{self._folder} has chat templates named {', '.join(sorted(self._templates))}, but "
            f"none named {' or '.join(names)}"
        )


def _up_to_final(text: str) -> str:
    """Returns the text of a conversation up to the end of its last message's content."""
    prefix, found, _ = text.rpartition(FINAL)
    if not found:
        raise TextError(
            "continue_final_message: the chat template does not write the last message's content; "
            "leave continue_final_message out"
        )
    return prefix


def flattened(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages without null fields, with text parts joined and uniform reasoning names.

    transformers 5.24 passes messages to templates in this form.

    Raises:
        TextError: If a message has no role, or a content that is not text.
    """
    if not messages:
        raise TextError("a chat must have at least one message")
    return [_flattened(place, message) for place, message in enumerate(messages)]


def _flattened(place: int, message: Mapping[str, Any]) -> dict[str, Any]:
    path = f"messages[{place}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TextError(f"{path} must be an object with a string `role`")
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "".join(_part(path, part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise TextError(
            f"{path}.content must be a string, a list of parts or null; got "
            f"{type(content).__name__}"
        )
    # Clients send null for missing fields, which templates would take for a value.
    fields = {key: value for key, value in message.items() if value is not None}
    thoughts = next((fields[key] for key in REASONING if isinstance(fields.get(key), str)), None)
    if thoughts is not None:
        fields = {"thinking": thoughts, **fields, "reasoning_content": thoughts}
    return {**fields, "content": content}


def known_roles(messages: Sequence[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Returns the messages, with `developer` replaced by `system` if the template lacks this role.

    OpenAI's API has replaced `system` by `developer`. If a conversation begins with both, they
    become one message, because many templates accept only one.
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


def _part(path: str, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind not in TEXT_PARTS or not isinstance(text, str):
        raise TextError(
            f"{path}.content has a part of type {kind!r}; a text model accepts only parts "
            'like {"type": "text", "text": …}'
        )
    return text
