"""The tokenizer of a GGUF file, from its metadata: what `tokenizers` needs of it, and the settings.

Files of byte-level BPE (`tokenizer.ggml.model` gpt2) have vocabulary and merges; how text is cut
before them has a name (`tokenizer.ggml.pre`), of which the ones below are known.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxattn.text.hub_tokenizer import HubTokenizer, load_json
from jaxattn.text.json_files import TextError
from jaxattn.text.tokenizer import Tokenizer
from jaxattn.text.tokenizer_config import SamplingDefaults, TemplateFile, TokenizerConfig

KEY = "tokenizer.ggml"
CONTROL, USER_DEFINED = 3, 4  # of token_type
# Tokens that the metadata name -> their names in a tokenizer's settings.
NAMED = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token",
    "eot": "eot_token", "eom": "eom_token",
}  # fmt: skip
ENDS = ("eos", "eot", "eom")
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_GPT2 = {**_BYTES, "use_regex": True}
_PLAIN = {**_BYTES, "use_regex": False}


def _split(digits: str) -> dict[str, Any]:
    """The cuts of Llama 3 and Qwen2, which differ in the digits that stay together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + "|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, _PLAIN]}


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
    """The tokenizer.

    Args:
        metadata: of a GGUF file.
        path: of the file, for messages.

    Raises:
        TextError: the metadata are missing or damaged, or of a kind that is not supported.
    """
    kind, cut = metadata.get(f"{KEY}.model"), metadata.get(f"{KEY}.pre", "gpt-2")
    if kind != "gpt2":
        raise TextError(
            f"{path}: {KEY}.model {kind!r:.60} is not supported, and gpt2 (byte-level BPE) is; "
            "load the model's folder from the hub"
        )
    if cut not in _CUTS:
        raise TextError(
            f"{path}: {KEY}.pre {cut!r:.60} is not supported; supported are {', '.join(_CUTS)}"
        )
    tokens, kinds = _list(metadata, "tokens", str, path), _list(metadata, "token_type", int, path)
    merges = _list(metadata, "merges", str, path)
    if len(set(tokens)) < len(tokens) or len(kinds) != len(tokens) or not tokens:
        raise TextError(
            f"{path} is damaged: {KEY} has {len(tokens):,} tokens, of which "
            f"{len(set(tokens)):,} differ, and the types of {len(kinds):,}"
        )
    added = [
        {
            "id": number,
            "content": token,
            "special": kinds[number] == CONTROL,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for number, token in enumerate(tokens)
        if kinds[number] in (CONTROL, USER_DEFINED) and token
    ]
    written = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if cut == "qwen2" else None,
        "pre_tokenizer": _CUTS[cut],
        "decoder": _BYTES | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": merges,
            "ignore_merges": cut == "llama-bpe",
        },
    }
    inner, spelling = load_json(json.dumps(written), path)
    return HubTokenizer(inner, spelling, _settings(metadata, tokens, path))


def _settings(metadata: Mapping[str, Any], tokens: Sequence[str], path: Path) -> TokenizerConfig:
    """What the files beside a tokenizer.json would say."""
    named, stops = {}, set[int]()
    for name, known in NAMED.items():
        number = metadata.get(f"{KEY}.{name}_token_id")
        if number is None:
            continue
        if not isinstance(number, int) or not 0 <= number < len(tokens):
            raise TextError(f"{path} is damaged: {KEY}.{name}_token_id is {number!r:.60}")
        named[known] = tokens[number]
        if name in ENDS:
            stops.add(number)
    template = metadata.get("tokenizer.chat_template")
    bos, eos = (metadata.get(f"{KEY}.add_{each}_token", False) for each in ("bos", "eos"))
    return TokenizerConfig(
        folder=path,
        named=named,
        more=(),
        add_bos=bool(bos) and "bos_token" in named,
        add_eos=bool(eos) and "eos_token" in named,
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
        raise TextError(f"{path} has no {KEY}.{name}, a list of {kind.__name__}")
    return list(found)
