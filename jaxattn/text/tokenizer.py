"""The interface of a tokenizer, and the tokenizer of models of bytes."""

import abc
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxattn.text.incremental_detokenizer import TokenStream
from jaxattn.text.json_files import TextError
from jaxattn.text.tokenizer_config import SamplingDefaults

type Message = Mapping[str, Any]


class Tokenizer(abc.ABC):
    """Text to token ids and back.

    Attributes:
        vocab_size: the ids it knows are 0 .. vocab_size - 1. A model's logits may be longer; the
            ids beyond are padding and have no text.
        stop_tokens: ids that end a text, sorted.
        defaults: how the model wants to be sampled.
        has_chat_template: whether `chat` works.
        chat_template: the source of the chat template; of all, where there are several.
        special_tokens: id -> text of tokens that are no part of a text, stop tokens among them.

    All methods may be called from several threads at once. A stream belongs to one text.
    """

    vocab_size: int
    stop_tokens: tuple[int, ...]
    defaults: SamplingDefaults
    has_chat_template: bool
    chat_template: str
    special_tokens: Mapping[int, str]

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a plain prompt, with BOS if the tokenizer's files say so.

        Special tokens in the text, such as "<|im_end|>", become their ids.
        """

    @abc.abstractmethod
    def stream(
        self,
        *,
        skip_special_tokens: bool = True,
        continues: bool = False,
        shown: Sequence[str] = (),
    ) -> TokenStream:
        """What turns tokens into text one at a time.

        Args:
            skip_special_tokens: special tokens and stop tokens have no text.
            continues: the text goes on after other text, as a completion after its prompt does: a
                space at its beginning stays.
            shown: special tokens that have a text all the same.
        """

    @abc.abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, special or not, within a text; empty for an unknown id."""

    def token_id(self, text: str) -> int | None:
        """The id of the token that is a text as a whole, such as a mark; None if none is."""
        return None

    @abc.abstractmethod
    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """The ids of a conversation, as the model's chat template writes it.

        The template runs in another process, for 5 seconds at most: a server calls this in a
        thread.

        Args:
            messages: objects of OpenAI's form: role, content, tool_calls. A content is a text, a
                list of text parts, which are joined, or None.
            tools: descriptions of functions, as JSON schemas.
            add_generation_prompt: ends with the beginning of the assistant's turn.
            variables: whatever else the template reads, such as enable_thinking.

        Raises:
            TextError: there is no template, the template is damaged or refuses the messages, or
                it does not come to an end.
        """

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens: exactly what `stream` gives for them, put together."""
        stream = self.stream(skip_special_tokens=skip_special_tokens)
        return "".join([*map(stream.push, tokens), stream.end()])


class ByteTokenizer(Tokenizer):
    """Each byte of UTF-8 is a token; byte 0 ends a text. The embedded model is one of bytes."""

    vocab_size = 256
    stop_tokens = (0,)
    defaults = SamplingDefaults()
    has_chat_template = False
    chat_template = ""
    special_tokens: Mapping[int, str] = {0: "\0"}

    def encode(self, text: str) -> list[int]:
        """The bytes of a text, with those that Python could not decode and escaped."""
        whole = re.sub("[\ud800-\udc7f\udd00-\udfff]", "\ufffd", text)
        return list(whole.encode("utf-8", "surrogateescape"))

    def stream(
        self,
        *,
        skip_special_tokens: bool = True,
        continues: bool = False,
        shown: Sequence[str] = (),
    ) -> TokenStream:
        hidden = self.stop_tokens if skip_special_tokens else ()

        def piece(token: int, first: bool) -> bytes | None:
            return None if token in hidden else self.token_bytes(token)

        return TokenStream(piece)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if 0 <= token < self.vocab_size else b""

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        raise TextError("a model of bytes has no chat template; give it plain text")
