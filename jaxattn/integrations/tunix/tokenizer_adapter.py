"""An adapter of jaxattn's tokenizers to the interface that Tunix accepts."""

from collections.abc import Sequence
from typing import Any

from jaxattn.text.tokenizer import Tokenizer


class TokenIds:
    """A tokenizer with the methods and special ids that Tunix needs.

    Args:
        tokenizer: A tokenizer of `jaxattn.text`.
        pad_id: A token that occurs in no text, since Tunix masks it everywhere in a completion. By
            default the first stop token, which completions only contain if `EngineRollout` has
            `keep_eos`.

    Raises:
        ValueError: If the tokenizer has no stop token, or no token `pad_id`.
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
        """Returns None, because `encode` adds BOS if the tokenizer's files ask for it."""
        return None

    def eos_id(self) -> int:
        return self.tokenizer.stop_tokens[0]

    def pad_id(self) -> int:
        return self._pad_id
