"""The tokenizer of a folder in the layout of the Hugging Face Hub, and `load`, which reads it."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Inner

from jaxattn.text.chat_template import ChatTemplate
from jaxattn.text.incremental_detokenizer import TokenStream
from jaxattn.text.json_files import MOST_JSON_BYTES, TextError, parse_object, read_text
from jaxattn.text.tiktoken import load_tiktoken
from jaxattn.text.token_bytes import BYTE_LEVEL, ByteDecoder, read_spelling
from jaxattn.text.tokenizer import Message, Tokenizer
from jaxattn.text.tokenizer_config import TokenizerConfig, read_settings

JSON, TIKTOKEN, SENTENCEPIECE = "tokenizer.json", "tiktoken.model", "tokenizer.model"
PANIC = "PanicException"  # raised for Rust panics; not a subclass of `Exception`
MOST_SAID = 300  # characters of the library's message, which may contain parts of the file


def load(folder: str | os.PathLike) -> Tokenizer:
    """Loads the tokenizer of a folder from tokenizer.json or, without it, from tiktoken.model.

    This function runs no code from the model's repository. It does not use transformers, whose
    newer versions replace the decoder of DeepSeek's tokenizer.json and thereby lose spaces.

    Raises:
        TextError: If a file is missing, damaged or of an unsupported kind.
    """
    path = Path(folder)
    if not path.is_dir():
        raise TextError(f"{path} is not a folder")
    settings = read_settings(path)
    if (text := read_text(path / JSON, MOST_JSON_BYTES)) is not None:
        inner, spelling = load_json(text, path / JSON)
    elif (path / TIKTOKEN).exists():
        inner, spelling = load_tiktoken(path / TIKTOKEN, settings), BYTE_LEVEL
    elif (path / SENTENCEPIECE).exists():
        raise TextError(
            f"{path} has {SENTENCEPIECE}, but no {JSON}: create one with transformers, "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )
    else:
        raise TextError(
            f"{path} has neither {JSON} nor {TIKTOKEN}: copy the model's tokenizer files into it"
        )
    return HubTokenizer(inner, spelling, settings)


def load_json(text: str, path: Path) -> tuple[Inner, ByteDecoder]:
    """Returns the tokenizer of a tokenizer.json, without truncation and padding, and its spelling.

    Raises:
        TextError: If the file is damaged, or its decoder is not supported.
    """
    values = parse_object(text, path)
    spelling = read_spelling(values.get("decoder"), path)
    _check_merges(values.get("model"), path)
    try:
        inner = Inner.from_str(text)
    except BaseException as error:  # the library has no exception class of its own
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        raise TextError(f"{path} is damaged: {str(error)[:MOST_SAID]}") from error
    inner.no_truncation()
    inner.no_padding()
    return inner, spelling


def _check_merges(model: Any, path: Path) -> None:
    """Checks the prefix of each merge's second token, as without it the library would abort."""
    values = model if isinstance(model, dict) else {}
    prefix, merges = values.get("continuing_subword_prefix"), values.get("merges")
    if not isinstance(prefix, str) or not isinstance(merges, list):
        return
    for merge in merges if prefix else ():
        tokens = merge.split(" ") if isinstance(merge, str) else merge
        if not (isinstance(tokens, list) and tokens and str(tokens[-1]).startswith(prefix)):
            raise TextError(
                f"{path} is damaged: merge {merge!r:.60} lacks the prefix {prefix!r:.60}"
            )


class HubTokenizer(Tokenizer):
    """A tokenizer that wraps one of the library `tokenizers`."""

    def __init__(self, inner: Inner, spelling: ByteDecoder, settings: TokenizerConfig):
        """
        Args:
            inner: The library's tokenizer.
            spelling: The decoder from the vocabulary's tokens to bytes.
            settings: The settings in the folder's other files.

        Raises:
            TextError: If a required special token is not in the vocabulary.
        """
        self._inner = inner
        self._spelling = spelling
        self._added = inner.get_added_tokens_decoder()
        self._pieces: dict[int, bytes | None] = {}
        self._template = ChatTemplate(settings)
        self._add_bos = settings.add_bos
        self._bos = self._named(settings, "bos_token") if settings.add_bos else None
        self._behind = [] if settings.add_bos is None else self._behind_prompts()
        eos_ids = settings.eos_ids
        if "eos_token" in settings.special_tokens and (
            not eos_ids or self._knows(settings, "eos_token")
        ):
            eos_ids = tuple(sorted({*eos_ids, self._named(settings, "eos_token")}))
        self.stop_tokens = eos_ids
        self.vocab_size = max(inner.get_vocab().values(), default=-1) + 1
        self.defaults = settings.defaults
        self.has_chat_template = bool(self._template)
        self.chat_template = self._template.source
        special = {token for token, added in self._added.items() if added.special} | {*eos_ids}
        self.special_tokens = {token: inner.id_to_token(token) or "" for token in sorted(special)}
        self._hidden = frozenset(special)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a prompt without a chat template.

        If `add_bos_token` of tokenizer_config.json is true, the ids begin with exactly one BOS; if
        it is false, no BOS is added. Without the field, the post-processor of tokenizer.json
        decides. Tokens that it adds after a prompt, such as an embedding model's EOS, always stay.
        """
        if self._add_bos is None:
            return self._ids(text, True)
        ids = self._ids(text, False)
        if self._bos is not None and ids[:1] != [self._bos]:
            ids = [self._bos, *ids]
        return ids + self._behind

    def stream(
        self,
        *,
        skip_special_tokens: bool = True,
        continues: bool = False,
        shown: Sequence[str] = (),
    ) -> TokenStream:
        hidden = self._hidden if skip_special_tokens else frozenset()
        if shown:
            hidden = hidden.difference(
                token for text in shown if (token := self._inner.token_to_id(text)) is not None
            )

        def piece(token: int, first: bool) -> bytes | None:
            if token in hidden:
                return None
            return self._first(token) if first else self._piece(token)

        return TokenStream(
            piece,
            strip=self._spelling.strip,
            max_stripped=self._spelling.max_stripped,
            continues=continues,
        )

    def token_bytes(self, token: int) -> bytes:
        return self._piece(token) or b""

    def token_id(self, text: str) -> int | None:
        return self._inner.token_to_id(text)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Returns the token ids of a conversation. Adds no BOS, as the template writes it."""
        text = self._template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )
        return self._ids(text, False)

    def _behind_prompts(self) -> list[int]:
        """Returns the ids that the post-processor of tokenizer.json adds after a prompt."""
        ruled, plain = self._ids("a", True), self._ids("a", False)
        ends = range(len(plain), len(ruled) + 1)
        return next((ruled[n:] for n in ends if ruled[n - len(plain) : n] == plain), [])

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of a text.

        Raises:
            TextError: If the library panics, for example because a pattern takes too long.
        """
        try:
            return self._inner.encode(well_formed(text), add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            if type(error).__name__ != PANIC:
                raise
            raise TextError(f"tokenizer.json cannot encode the text: {error}") from None

    def _knows(self, settings: TokenizerConfig, name: str) -> bool:
        return self._inner.token_to_id(settings.special_tokens[name]) is not None

    def _named(self, settings: TokenizerConfig, name: str) -> int:
        text = settings.special_tokens.get(name)
        token = None if text is None else self._inner.token_to_id(text)
        if token is None:
            raise TextError(
                f"{settings.folder}: {name} of tokenizer_config.json must be a token of the "
                f"vocabulary; got {text!r}"
            )
        return token

    def _piece(self, token: int) -> bytes | None:
        """Returns the bytes of a token within a text; None for an unknown id."""
        if token not in self._pieces:
            self._pieces[token] = self._spelled(token, self._spelling.data)
        return self._pieces[token]

    def _first(self, token: int) -> bytes | None:
        return self._spelled(token, self._spelling.first)

    def _spelled(self, token: int, spell: Callable[[str], bytes]) -> bytes | None:
        if not 0 <= token < self.vocab_size:
            return None
        text = self._inner.id_to_token(token)
        if text is None:
            return None
        if self._spelling.is_byte_level and token in self._added:
            return text.encode("utf-8", "replace")
        return spell(text)


def well_formed(text: str) -> str:
    """Replaces lone surrogates, which JSON and command lines may contain, by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
