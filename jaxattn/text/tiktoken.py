"""The conversion of a tiktoken.model to a tokenizer of the library `tokenizers`, in memory.

Each line of the file has a token in base64 and its rank, which is also its id. tiktoken repeatedly
merges the two neighbors whose joined bytes have the lowest rank. `tokenizers` instead needs an
ordered list of pairs, and merges the pair that comes first in it. The list made here contains, rank
by rank, every split of a token into two tokens.

Both give the same results. Consider two neighbors that can merge to a token t. No earlier merge
has crossed the ends of t's bytes, so the merges within them were the same as for t by itself.
The two neighbors are therefore t's last pair. Other splits of t never occur, and their order
among t's pairs does not matter. A word that is itself a token becomes that token in both
(`ignore_merges`).

The pattern that divides text into words is part of each repository's Python code. Here it is a
constant.
"""

import binascii
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Inner

from jaxattn.text.json_files import TextError, read_bytes
from jaxattn.text.token_bytes import byte_alphabet
from jaxattn.text.tokenizer_config import AddedVocabToken, TokenizerConfig

MOST_BYTES = 32 * 2**20
MOST_TOKEN_BYTES = 1024
RESERVED = 256  # number of ids after the ranks, some of which added_tokens_decoder names
_ALPHABET = byte_alphabet()

# Moonshot's pattern, for Moonlight, Kimi-K2 and Kimi-Linear. A run of Han characters is a word. In
# other words, upper case precedes lower case, with an optional mark before and contraction after.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERNS = {
    "TikTokenTokenizer": "|".join(
        [
            r"[\p{Han}]+",
            f"{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}",
            f"{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    )
}


def load_tiktoken(path: Path, settings: TokenizerConfig) -> Inner:
    """Loads the tokenizer of a tiktoken.model.

    Args:
        path: The file's path.
        settings: The folder's settings. `tokenizer_class` chooses the pattern, and `added` names
            special tokens. The other `RESERVED` ids after the ranks are "<|reserved_token_i|>".

    Raises:
        TextError: If the file is damaged, or no pattern is known for the tokenizer's class.
    """
    pattern = PATTERNS.get(settings.tokenizer_class or "")
    if pattern is None:
        raise TextError(
            f"{settings.folder}: tokenizer_config.json has the tokenizer_class "
            f"{settings.tokenizer_class!r}, but {path.name} is supported only for "
            f"{', '.join(PATTERNS)}; add a tokenizer.json to the folder"
        )
    tokens = read_ranks(path)
    inner = Inner(byte_pairs(tokens))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    for token, added in special_tokens(len(tokens), settings).items():
        inner.add_tokens([AddedToken(added.content, special=added.special, normalized=False)])
        if (got := inner.token_to_id(added.content)) != token:
            raise TextError(
                f"{settings.folder}: tokenizer_config.json gives {added.content!r} the id "
                f"{token:,}, but this text already has the id {got:,}"
            )
    return inner


def read_ranks(path: Path) -> list[bytes]:
    """Returns the tokens of the file, in the order of their ranks.

    Raises:
        TextError: If a line is not a token and a rank, a token or rank occurs twice, or a token is
            longer than `MOST_TOKEN_BYTES`. Also if a rank or a single byte is missing.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate((read_bytes(path, MOST_BYTES) or b"").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            text, rank = line.split()
            token, place = binascii.a2b_base64(text, strict_mode=True), int(rank)
        except ValueError:
            raise TextError(
                f"{path} is damaged: line {number:,} is not a base64 token and a rank: "
                f"{line[:60]!r}"
            ) from None
        if token in ranks:
            raise TextError(f"{path} is damaged: the token of line {number:,} is listed twice")
        if not 0 < len(token) <= MOST_TOKEN_BYTES:
            raise TextError(
                f"{path}: the token of line {number:,} has {len(token):,} bytes; supported are 1 "
                f"to {MOST_TOKEN_BYTES:,}"
            )
        ranks[token] = place
    return _in_order(path, ranks)


def _in_order(path: Path, ranks: dict[bytes, int]) -> list[bytes]:
    tokens: dict[int, bytes] = {}
    for token, rank in ranks.items():
        if rank in tokens:
            raise TextError(f"{path} is damaged: rank {rank:,} is listed twice")
        tokens[rank] = token
    missing = next((rank for rank in range(len(tokens)) if rank not in tokens), None)
    if missing is not None:
        raise TextError(
            f"{path} is damaged: rank {missing:,} is missing, but the file has {len(tokens):,} "
            "tokens"
        )
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise TextError(f"{path} is damaged: no token is the single byte 0x{byte:02X}")
    return [tokens[rank] for rank in range(len(tokens))]


def byte_pairs(tokens: list[bytes]) -> models.BPE:
    """Returns the BPE model that divides words as tiktoken does.

    Args:
        tokens: The tokens in the order of their ranks, including all 256 single bytes.
    """
    names = {token: token.decode("latin-1").translate(_ALPHABET) for token in tokens}
    vocabulary = {name: rank for rank, name in enumerate(names.values())}
    return models.BPE(vocabulary, list(_pairs(names)), ignore_merges=True)


def _pairs(names: dict[bytes, str]) -> Iterator[tuple[str, str]]:
    """Yields every split of a token into two tokens, rank by rank."""
    for token in names:
        for cut in range(1, len(token)):
            left = names.get(token[:cut])
            if left is not None and (right := names.get(token[cut:])) is not None:
                yield left, right


def special_tokens(ranks: int, settings: TokenizerConfig) -> dict[int, AddedVocabToken]:
    """Returns the tokens after the ranks by id, without gaps.

    Raises:
        TextError: If an id in `added` is that of a rank, or is much too large.
    """
    added_tokens = settings.added
    min_id = min(added_tokens, default=ranks)
    end = max(added_tokens, default=-1) + 1
    if min_id < ranks or end > ranks + 16 * RESERVED:
        raise TextError(
            f"{settings.folder}: added_tokens_decoder of tokenizer_config.json has the ids "
            f"{min_id:,} to {end - 1:,}; special tokens must follow the {ranks:,} ranks of "
            f"tiktoken.model within {16 * RESERVED:,} ids"
        )
    reserved = ranks + RESERVED
    if settings.vocab_size is not None:  # larger ids have no logits
        reserved = min(reserved, settings.vocab_size)
    return {
        token: added_tokens.get(token)
        or AddedVocabToken(content=f"<|reserved_token_{token}|>", special=True)
        for token in range(ranks, max(reserved, end))
    }
