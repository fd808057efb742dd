"""The tokenizer of a GGUF file, built from the file's metadata.

Files with byte-level BPE (`tokenizer.ggml.model` is gpt2) contain the vocabulary and the merges.
They only name the pre-tokenizer (`tokenizer.ggml.pre`); this module supports the names below. Files
with SentencePiece's BPE (llama, for Llama 2 and Mistral) contain a score for each token. The merge
of two neighbors that gives the token with the highest score comes first.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxattn.text.hub_tokenizer import HubTokenizer, load_json
from jaxattn.text.json_files import TextError
from jaxattn.text.tokenizer import Tokenizer
from jaxattn.text.tokenizer_config import SamplingDefaults, TemplateFile, TokenizerConfig

KEY = "tokenizer.ggml"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # values of token_type
SPACE = "\u2581"  # SentencePiece's character for a space
# Names of special tokens in the metadata -> in tokenizer_config.json.
NAMED = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token",
    "eot": "eot_token", "eom": "eom_token",
}  # fmt: skip
ENDS = ("eos", "eot", "eom")
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_GPT2 = {**_BYTES, "use_regex": True}
_PLAIN = {**_BYTES, "use_regex": False}


def _split(digits: str) -> dict[str, Any]:
    """Returns Llama 3's or Qwen2's pre-tokenizer, which differ in the number of joined digits."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + "|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, _PLAIN]}


_CUTS: dict[str, dict[str, Any]] = {
    "gpt-2": _GPT2,
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _GPT2],
    },
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "qwen2": _split(r"\p{N}"),
}


def tokenizer_of(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """Returns the tokenizer of a GGUF file.

    Args:
        metadata: The file's metadata.
        path: The file's path, for error messages.

    Raises:
        TextError: If the metadata are missing, damaged, or of an unsupported kind.
    """
    kind = metadata.get(f"{KEY}.model")
    if kind not in _WRITTEN:
        raise TextError(
            f"{path}: {KEY}.model {kind!r:.60} is not supported; supported are gpt2 (byte-level "
            "BPE) and llama (SentencePiece's BPE). Load the model's folder from the hub"
        )
    tokens, kinds = _list(metadata, "tokens", str, path), _list(metadata, "token_type", int, path)
    if len(set(tokens)) < len(tokens) or len(kinds) != len(tokens) or not tokens:
        raise TextError(
            f"{path} is damaged: {KEY} has {len(tokens):,} tokens, {len(set(tokens)):,} of them "
            f"distinct, and types for {len(kinds):,}"
        )
    special = (CONTROL,) if kind == "gpt2" else (CONTROL, UNKNOWN)
    added = [
        {
            "id": number,
            "content": token,
            "special": kinds[number] in special,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for number, token in enumerate(tokens)
        if kinds[number] in (*special, USER_DEFINED) and token
    ]
    settings = _settings(metadata, tokens, path, add_bos=kind == "llama")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model_fields = _WRITTEN[kind](metadata, vocabulary, kinds, settings, path)
    tokenizer_json = {"version": "1.0", "added_tokens": added, **model_fields}
    return HubTokenizer(*load_json(json.dumps(tokenizer_json), path), settings)


def _byte_level(
    metadata: Mapping[str, Any],
    vocabulary: dict[str, int],
    kinds: Sequence[int],
    settings: TokenizerConfig,
    path: Path,
) -> dict[str, Any]:
    """Returns the fields of a tokenizer.json for byte-level BPE."""
    pre_tokenizer = metadata.get(f"{KEY}.pre", "gpt-2")
    if pre_tokenizer not in _CUTS:
        raise TextError(
            f"{path}: {KEY}.pre {pre_tokenizer!r:.60} is not supported; supported are "
            f"{', '.join(_CUTS)}"
        )
    return {
        "normalizer": {"type": "NFC"} if pre_tokenizer == "qwen2" else None,
        "pre_tokenizer": _CUTS[pre_tokenizer],
        "decoder": _BYTES | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": _list(metadata, "merges", str, path),
            "ignore_merges": pre_tokenizer == "llama-bpe",
        },
    }


def _sentencepiece(
    metadata: Mapping[str, Any],
    vocabulary: dict[str, int],
    kinds: Sequence[int],
    settings: TokenizerConfig,
    path: Path,
) -> dict[str, Any]:
    """Returns the fields of a tokenizer.json for SentencePiece's BPE, with merges in the order of
    the scores."""
    scores = _list(metadata, "scores", float, path)
    if len(scores) != len(vocabulary):
        raise TextError(
            f"{path} is damaged: {KEY} has {len(vocabulary):,} tokens, but {len(scores):,} scores"
        )
    pieces = {token for token, number in vocabulary.items() if kinds[number] == NORMAL}
    merges = []
    for token in sorted(pieces, key=lambda token: -scores[vocabulary[token]]):
        halves = ((token[:place], token[place:]) for place in range(1, len(token)))
        merges += [pair for pair in halves if pieces.issuperset(pair)]
    normalizers: list[Any] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    decoders: list[Any] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if metadata.get(f"{KEY}.add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": merges,
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": settings.special_tokens.get("unk_token"),
        },
    }


_WRITTEN: dict[Any, Callable[..., dict[str, Any]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


def _settings(
    metadata: Mapping[str, Any], tokens: Sequence[str], path: Path, *, add_bos: bool
) -> TokenizerConfig:
    """Returns the settings that a hub folder has in other files than tokenizer.json.

    Args:
        add_bos: The default if the metadata do not say whether to add BOS.
    """
    special_tokens, stops = {}, set[int]()
    for name, hub_name in NAMED.items():
        number = metadata.get(f"{KEY}.{name}_token_id")
        if number is None:
            continue
        if not isinstance(number, int) or not 0 <= number < len(tokens):
            raise TextError(
                f"{path} is damaged: {KEY}.{name}_token_id must be an integer from 0 to "
                f"{len(tokens) - 1:,}; got {number!r:.60}"
            )
        special_tokens[hub_name] = tokens[number]
        if name in ENDS:
            stops.add(number)
    template = metadata.get("tokenizer.chat_template")
    add_bos = metadata.get(f"{KEY}.add_bos_token", add_bos)
    return TokenizerConfig(
        folder=path,
        special_tokens=special_tokens,
        additional_special_tokens=(),
        add_bos=bool(add_bos) and "bos_token" in special_tokens,
        eos_ids=tuple(sorted(stops)),
        defaults=SamplingDefaults(),
        vocab_size=len(tokens),
        added={},
        tokenizer_class=None,
        templates={"default": TemplateFile(source=template, path=path)}
        if isinstance(template, str) and template
        else {},
    )


def _list(metadata: Mapping[str, Any], name: str, kind: type, path: Path) -> list[Any]:
    found = metadata.get(f"{KEY}.{name}")
    if not isinstance(found, list | tuple) or not all(isinstance(each, kind) for each in found):
        raise TextError(f"{path}: {KEY}.{name} is missing or not a list of {kind.__name__}")
    return list(found)
