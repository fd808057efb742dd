"""The interface of tokenizers, and the tokenizer of byte models."""

import abc
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxattn.text.incremental_detokenizer import TokenStream
from jaxattn.text.json_files import TextError
from jaxattn.text.tokenizer_config import SamplingDefaults

type Message = Mapping[str, Any]


class Tokenizer(abc.ABC):
    """The interface of tokenizers.

    Attributes:
        vocab_size: The number of ids, which are 0 .. vocab_size - 1. A model may have more logits;
            their ids are padding and have no text.
        stop_tokens: The ids that end a text, sorted.
        defaults: The model's recommended sampling parameters.
        has_chat_template: Whether `chat` works.
        chat_template: The source of the chat template. For several templates, all sources joined.
        special_tokens: A map from id to text of the special tokens, including stop tokens.

    All methods are thread-safe. Each text needs its own stream.
    """

    vocab_size: int
    stop_tokens: tuple[int, ...]
    defaults: SamplingDefaults
    has_chat_template: bool
    chat_template: str
    special_tokens: Mapping[int, str]

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a prompt, with BOS if the tokenizer's files ask for it.

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
        """Returns an incremental detokenizer.

        Args:
            skip_special_tokens: Whether to leave out special tokens and stop tokens.
            continues: Whether the text continues other text, as a completion continues its prompt.
                A space at its beginning then stays.
            shown: The special tokens that stay in the text in any case.
        """

    @abc.abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of any token within a text, also of a special one; empty for an unknown
        id."""

    def token_id(self, text: str) -> int | None:
        """Returns the id of the token with exactly this text; None if there is none."""
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
        """Returns the token ids of a conversation, rendered by the model's chat template.

        The template runs in another process and blocks the caller for up to 5 seconds. A server
        should call this method in a thread.

        Args:
            messages: Messages in OpenAI's format, with role, content and tool_calls. A content is a
                string, a list of text parts, which are joined, or None.
            tools: Descriptions of functions, as JSON schemas.
            add_generation_prompt: Whether to append the beginning of the assistant's turn.
            variables: Other variables of the template, such as enable_thinking.

        Raises:
            TextError: If there is no template, or it is damaged, rejects the messages or times out.
        """

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of tokens, which equals the joined pieces of `stream`."""
        stream = self.stream(skip_special_tokens=skip_special_tokens)
        return "".join([*map(stream.push, tokens), stream.end()])


class ByteTokenizer(Tokenizer):
    """A tokenizer whose tokens are UTF-8 bytes, as for the embedded model. Byte 0 ends a text."""

    vocab_size = 256
    stop_tokens = (0,)
    defaults = SamplingDefaults()
    has_chat_template = False
    chat_template = ""
    special_tokens: Mapping[int, str] = {0: "\0"}

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of a text. Python's surrogate escapes become their original bytes."""
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
        raise TextError("a byte-level model has no chat template; give a plain prompt")
