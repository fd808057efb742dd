"""Small tokenizers of the three kinds of spelling, and folders that contain them."""

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

CORPUS = [
    "Hello world, it's the 12345th time",
    "你好世界 hello",
    "naïve café 🙂🙃 日本語",
    "  a\n\tb  ",
]
SPECIAL = ("<｜begin｜>", "<|end|>", "<|im_end|>")


def byte_level() -> Tokenizer:
    """256 bytes, some pairs of the corpus, three special tokens and one ordinary added token."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        CORPUS, BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    _add(inner, SPECIAL, special=True)
    _add(inner, ["<think é>"], special=False)
    return inner


def byte_fallback() -> Tokenizer:
    """Like Llama's and MiniCPM3's: "▁" for spaces, bytes for text outside the vocabulary."""
    pieces = [*"▁abcdehlorwt", "▁h", "el", "lo", "▁▁", "中"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [("▁", "h"), ("e", "l"), ("l", "o"), ("▁", "▁")]
    inner = Tokenizer(
        models.BPE(
            {token: place for place, token in enumerate(tokens)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    _add(inner, SPECIAL, special=True)
    return inner


def metaspace() -> Tokenizer:
    """A tokenizer in which a word's first piece begins with "▁"."""
    pieces = ["▁", *"abcdehlorwt中", "▁hello", "▁world", "lo", "▁▁a"]
    inner = Tokenizer(models.Unigram([("<unk>", 0.0), *((p, -float(len(p))) for p in pieces)], 0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    _add(inner, SPECIAL, special=True)
    return inner


SPELLINGS = {"bytes": byte_level, "fallback": byte_fallback, "metaspace": metaspace}


def _add(inner: Tokenizer, contents: Any, *, special: bool) -> None:
    inner.add_tokens([AddedToken(c, special=special, normalized=False) for c in contents])


def write_folder(folder: Path, inner: Tokenizer | None, **files: Any) -> Path:
    """Writes a folder with tokenizer.json, and a JSON file for each of `files`."""
    folder.mkdir(parents=True, exist_ok=True)
    if inner is not None:
        inner.save(str(folder / "tokenizer.json"))
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def tiktoken_lines(tokens: list[bytes]) -> bytes:
    """The content of a tiktoken.model."""
    return b"".join(b"%s %d\n" % (base64.b64encode(t), rank) for rank, t in enumerate(tokens))
