"""The text settings in a folder's JSON files: stop tokens, BOS, sampling defaults and templates.

The files are generation_config.json, config.json and tokenizer_config.json. Each may be missing.
A field that exists must have its type.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxattn.core.validation.config_fields import Integer, ListOf, Text
from jaxattn.core.validation.field_reader import OptionalFields
from jaxattn.text.json_files import TextError, read_object, read_text

GENERATION, CONFIG, TOKENIZER = "generation_config.json", "config.json", "tokenizer_config.json"
TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
MOST_TEMPLATE_BYTES = 2**20
MOST_ID = 2**31 - 1
EOS = "eos_token_id"
LEAST_PENALTY = 0.01  # minimum of repetition_penalty, as in a request
ID, TEXT = Integer(0, MOST_ID), Text()
# The tokens that a chat template may name.
NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """The sampling parameters in generation_config.json. Fields that it does not set are None.

    Attributes:
        temperature: A number of at least 0. It is 0 if do_sample is false, and 1 if do_sample is
            true and the file sets no temperature.
        top_p: A number above 0 and at most 1.
        top_k: An integer of at least 1. None also stands for 0 and -1, which mean all tokens.
        min_p: A number from 0 to 1.
        repetition_penalty: A number above 0; 1 has no effect.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddedVocabToken:
    """A token of `added_tokens_decoder`, outside of the main vocabulary.

    Attributes:
        content: The token's text.
        special: Whether the token is a control token and not part of visible text.
    """

    content: str
    special: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemplateFile:
    """A chat template and the file that contains it."""

    source: str
    path: Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The text settings of a model's folder.

    Attributes:
        folder: The folder.
        special_tokens: The special tokens by the names that a template uses, such as bos_token.
        additional_special_tokens: The `additional_special_tokens`.
        add_bos: Whether a prompt begins with BOS; None leaves this to tokenizer.json.
        eos_ids: The end-of-sequence ids in generation_config.json and config.json, merged. Empty if
            neither has one.
        defaults: The sampling parameters.
        vocab_size: The number of logits in config.json; None if it is missing.
        added: The tokens outside of the main vocabulary, by id.
        tokenizer_class: The field of tokenizer_config.json; None if it is missing.
        templates: The chat templates by name, such as "default" and "tool_use".
    """

    folder: Path
    special_tokens: Mapping[str, str]
    additional_special_tokens: tuple[str, ...]
    add_bos: bool | None
    eos_ids: tuple[int, ...]
    defaults: SamplingDefaults
    vocab_size: int | None
    added: Mapping[int, AddedVocabToken]
    tokenizer_class: str | None
    templates: Mapping[str, TemplateFile]


def read_settings(folder: Path) -> TokenizerConfig:
    """Reads the text settings of a folder.

    Raises:
        TextError: If a file is damaged, or a field has a wrong type.
    """
    generation = _fields(folder / GENERATION)
    config = _fields(folder / CONFIG)
    tokenizer = _fields(folder / TOKENIZER)
    inner = config.object("text_config")  # multimodal models nest the text model's fields here
    named = {f"{name}_token": tokenizer.token(f"{name}_token") for name in NAMED}
    eos_ids = tuple(sorted({*generation.ids(EOS), *config.ids(EOS), *inner.ids(EOS)}))
    return TokenizerConfig(
        folder=folder,
        special_tokens={name: token for name, token in named.items() if token is not None},
        additional_special_tokens=tokenizer.items(
            "additional_special_tokens", ListOf(_content), "a list of tokens"
        ),
        add_bos=tokenizer.flag("add_bos_token"),
        eos_ids=eos_ids,
        defaults=_defaults(generation),
        vocab_size=config.optional("vocab_size", ID) or inner.optional("vocab_size", ID),
        added=_added(tokenizer),
        tokenizer_class=tokenizer.text("tokenizer_class"),
        templates=_templates(folder, tokenizer),
    )


class FileFields(OptionalFields):
    """The fields of a file, or of an object inside it. Their errors are TextErrors."""

    def name(self, field: str) -> str:
        return f"{self.where}: {field:.60}"

    def error(self, field: str, message: str) -> TextError:
        return TextError(message)

    def ids(self, field: str) -> tuple[int, ...]:
        """Returns a field that is an id or a list of ids, sorted and without duplicates."""
        wanted = f"an id from 0 to {MOST_ID:,} or a list of ids"
        return tuple(sorted(set(self.items(field, ListOf(ID, single=True), wanted))))

    def token(self, field: str) -> str | None:
        """Returns a field that is a token's text, or an object with the text as `content`."""
        return self.optional(field, _content, "a string or an object with a string `content`")


def _fields(path: Path) -> FileFields:
    return FileFields(read_object(path), str(path))


def _content(name: str, value: Any) -> str:
    """Checks a token, which is a text or an object with one, and returns the text."""
    return TEXT(name, value.get("content") if isinstance(value, dict) else value)


def _is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogates, which JSON can contain."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _defaults(generation: FileFields) -> SamplingDefaults:
    min_top_p = math.ulp(0.0)
    top_k = generation.number("top_k", -1, MOST_ID, "an integer of at least -1")
    if top_k is not None and not top_k.is_integer():
        raise generation.wrong("top_k", "an integer of at least -1")
    temperature = generation.number("temperature", 0, 1e6, "a number of at least 0")
    match generation.flag("do_sample"):
        case False:
            temperature = 0.0
        case True if temperature is None:
            temperature = 1.0
    return SamplingDefaults(
        temperature=temperature,
        top_p=generation.number("top_p", min_top_p, 1, "a number above 0 and at most 1"),
        top_k=int(top_k) if top_k is not None and top_k > 0 else None,
        min_p=generation.number("min_p", 0, 1, "a number from 0 to 1"),
        repetition_penalty=generation.number(
            "repetition_penalty", LEAST_PENALTY, 1 / LEAST_PENALTY, "a number from 0.01 to 100"
        ),
    )


def _added(tokenizer: FileFields) -> dict[int, AddedVocabToken]:
    field = tokenizer.object("added_tokens_decoder")
    found = {}
    for key in field.values:
        entry = field.object(key)
        content = entry.text("content")
        digits = key.isdecimal() and len(key) <= len(str(MOST_ID))
        if not digits or int(key) > MOST_ID or not content or not _is_unicode(content):
            raise field.wrong(key, "a token id, and its object must have a nonempty `content`")
        found[int(key)] = AddedVocabToken(content=content, special=bool(entry.flag("special")))
    return found


def _templates(folder: Path, tokenizer: FileFields) -> dict[str, TemplateFile]:
    """Returns the templates in separate files or, without these, in tokenizer_config.json."""
    paths = {"default": folder / TEMPLATE}
    paths |= {path.stem: path for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    texts = {name: read_text(path, MOST_TEMPLATE_BYTES) for name, path in paths.items()}
    found = {
        name: TemplateFile(source=text, path=paths[name])
        for name, text in texts.items()
        if text  # an empty template would give an empty prompt
    }
    return found or {
        name: TemplateFile(source=text, path=folder / TOKENIZER)
        for name, text in _named_templates(tokenizer).items()
    }


def _named_templates(tokenizer: FileFields) -> dict[str, str]:
    value = tokenizer.values.get("chat_template")
    if value is None or isinstance(value, str):
        return {"default": value} if value else {}
    try:
        found = {each["name"]: each["template"] for each in value}
    except (TypeError, KeyError):
        found = {}
    if not found or not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise tokenizer.wrong(
            "chat_template", "a string or a list of objects with the strings `name` and `template`"
        )
    return found
