"""A tokenizer of jaxattn in the form that Tunix's adapter accepts."""

from collections.abc import Sequence
from typing import Any

from jaxattn.text.tokenizer import Tokenizer


class TokenIds:
    """Text to token ids and back, with the ids that Tunix asks for.

    Args:
        tokenizer: of `jaxattn.text`.
        pad_id: a token that no text has. Tunix masks it wherever it stands in a completion. None:
            the stop token, which a completion does not hold unless `EngineRollout` keeps it.

    Raises:
        ValueError: the tokenizer has no stop token, or `pad_id` is none of its tokens.
    """

    def __init__(self, tokenizer: Tokenizer, pad_id: int | None = None):
        if not tokenizer.stop_tokens:
            raise ValueError("TokenIds: the tokenizer has no stop token, which Tunix needs")
        pad_id = tokenizer.stop_tokens[0] if pad_id is None else pad_id
        if not 0 <= pad_id < tokenizer.vocab_size:
            raise ValueError(
                f"TokenIds: pad_id must be from 0 to {tokenizer.vocab_size - 1}; got {pad_id}"
            )
        self.tokenizer, self._pad_id = tokenizer, pad_id

    def encode(self, text: str, **options: Any) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return self.tokenizer.decode(ids)

    def bos_id(self) -> None:
        """None: `encode` begins a prompt with BOS where the tokenizer's files say so."""
        return None

    def eos_id(self) -> int:
        return self.tokenizer.stop_tokens[0]

    def pad_id(self) -> int:
        return self._pad_id
