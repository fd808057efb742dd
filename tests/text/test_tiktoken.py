"""A tiktoken.model divides text as tiktoken does; every way to damage the file is named."""

import itertools
import json
import random
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import pre_tokenizers

from jaxattn.text import TextError, load
from jaxattn.text.tiktoken import MOST_TOKEN_BYTES, PATTERNS, byte_pairs
from tests.helpers.text_cases import tiktoken_lines, write_folder

PATTERN = PATTERNS["TikTokenTokenizer"]
BYTES = [bytes([byte]) for byte in range(256)]
# As a vocabulary grows: each token is two that stand before it.
GROWN = [
    *BYTES,
    *(b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b"ld", b" world", b"12", b"123"),
    *("你".encode()[:2], "你".encode(), "好".encode()[:2], "好".encode(), "你好".encode()),
    *(b"  ", b"    ", b"'s", b"it", b"it's", b"\n\n"),
]
CONFIG = {
    "tokenizer_class": "TikTokenTokenizer",
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "added_tokens_decoder": {
        str(len(GROWN)): {"content": "[BOS]", "special": True},
        str(len(GROWN) + 1): {"content": "[EOS]", "special": True},
        str(len(GROWN) + 3): {"content": "<call>", "special": False},
    },
}


def tiktoken_folder(folder, content=None, config=CONFIG):
    write_folder(folder, None, tokenizer_config=config, config={"vocab_size": 300})
    (folder / "tiktoken.model").write_bytes(tiktoken_lines(GROWN) if content is None else content)
    return folder


@pytest.fixture
def folder(tmp_path):
    return tiktoken_folder(tmp_path / "model")


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    return load(tiktoken_folder(tmp_path_factory.mktemp("grown")))


def ids_of(*tokens):
    return [GROWN.index(token) for token in tokens]


def test_a_text_is_divided_as_tiktoken_divided_it(grown):
    # Frozen from tiktoken 0.14, with the pattern as it stands in Moonshot's repositories.
    text = "hello world, it's 你好12345<call>\n\nHELLO"
    expected = [259, 264, 44, 32, 276, 32, 271, 266, 52, 53, 281, 277, 72, 69, 76, 76, 79]
    assert grown.encode(text) == expected
    assert grown.decode(expected) == text


@pytest.mark.parametrize(
    "text, words",
    [
        ("中文English混合", ["中文", "English", "混合"]),
        ("don't WON'T", ["don't", " WON'T"]),
        ("camelCase HTTPServer", ["camel", "Case", " HTTPServer"]),
        ("1234567", ["123", "456", "7"]),
        ("a  \n b   c", ["a", "  \n", " b", "  ", " c"]),
        ("x != y;\n\n", ["x", " !=", " y", ";\n\n"]),
    ],
)
def test_the_pattern_divides_words(text, words, grown):
    split = grown._inner.pre_tokenizer.pre_tokenize_str(text)
    offsets = [span for _, span in split]
    assert [text[begin:end] for begin, end in offsets] == words


def joined(word, ranks):
    """How tiktoken divides a word: of all neighbors it joins those of the lowest rank first."""
    if word in ranks:
        return [ranks[word]]
    parts = [word[place : place + 1] for place in range(len(word))]
    while pairs := [
        (ranks[left + right], place)
        for place, (left, right) in enumerate(itertools.pairwise(parts))
        if left + right in ranks
    ]:
        _, place = min(pairs)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [ranks[part] for part in parts]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text("abc", min_size=2, max_size=6), unique=True, max_size=25),
    st.lists(st.text("abc", max_size=25), max_size=5),
)
def test_words_are_divided_as_tiktoken_does_whatever_the_vocabulary(tokens, words):
    """Tokens that no join reaches, or only through tokens of a higher rank, are among them."""
    vocabulary = [*BYTES, *(token.encode() for token in tokens)]
    ranks = {token: rank for rank, token in enumerate(vocabulary)}
    inner = Inner(byte_pairs(vocabulary))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in words:
        assert inner.encode(word).ids == joined(word.encode(), ranks)


def test_it_equals_tiktoken_itself(grown):
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {token: rank for rank, token in enumerate(GROWN)}
    oracle = tiktoken.Encoding("grown", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    choose = random.Random(0)
    for _ in range(500):
        text = "".join(choose.choices("helo wrd123 it'sIT你好é🙂\n\t.-", k=choose.randint(0, 60)))
        assert grown.encode(text) == oracle.encode_ordinary(text)
        for word in text.split():
            assert joined(word.encode(), ranks) == oracle._encode_single_piece(word)


def test_special_tokens_have_the_ids_of_the_file_and_the_others_are_reserved(grown):
    first = len(GROWN)
    assert grown.encode("[BOS]hello[EOS]") == [first, *ids_of(b"hello"), first + 1]
    assert grown.encode(f"<|reserved_token_{first + 2}|>") == [first + 2]
    assert grown.encode("<call>") == [first + 3]
    assert grown.vocab_size == 300  # the model's; 256 reserved ids would be more
    assert grown.stop_tokens == (first + 1,)
    shown = grown.decode([first, first + 2, first + 3, *ids_of(b"hello"), first + 1])
    assert shown == "<call>hello"


def test_all_reserved_ids_are_there_without_a_vocab_size(folder):
    (folder / "config.json").unlink()
    assert load(folder).vocab_size == len(GROWN) + 256


def test_lines_may_stand_in_any_order(folder, grown):
    lines = tiktoken_lines(GROWN).splitlines(keepends=True)
    (folder / "tiktoken.model").write_bytes(b"".join(reversed(lines)))
    text = "hello world, it's 你好12345"
    assert load(folder).encode(text) == grown.encode(text)


WHOLE = tiktoken_lines(GROWN)
LINES = WHOLE.splitlines(keepends=True)
LONG = b"a" * (MOST_TOKEN_BYTES + 1)
DAMAGED = {
    "no base64": (b"!!!! 5\n" + WHOLE, "line 1 is not a base64 token and a rank: b'!!!! 5'"),
    "no rank": (WHOLE + b"aGk=\n", f"line {len(LINES) + 1} is not a base64 token"),
    "rank of letters": (WHOLE + b"aGk= x\n", "is not a base64 token and a rank"),
    "cut off": (WHOLE[:-3] + b"\xff", "tiktoken.model is damaged: line 278"),
    "rank twice": (WHOLE + b"aGk= 7\n", "rank 7 is listed twice"),
    "token twice": (WHOLE + LINES[5], f"the token of line {len(LINES) + 1} is listed twice"),
    "gap": (WHOLE + b"aGk= 999\n", f"rank {len(LINES)} is missing, but the file has 279"),
    "below zero": (WHOLE + b"aGk= -1\n", f"rank {len(LINES)} is missing"),
    "no byte": (tiktoken_lines(GROWN[1:]), "no token is the single byte 0x00"),
    "empty": (b"", "no token is the single byte 0x00"),
    "empty token": (WHOLE + b" 278\n", "line 279 is not a base64 token"),
    "long": (tiktoken_lines([*GROWN, LONG]), "has 1,025 bytes; supported are 1 to 1,024"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named(name, folder):
    content, words = DAMAGED[name]
    (folder / "tiktoken.model").write_bytes(content)
    with pytest.raises(TextError, match="tiktoken.model") as caught:
        load(folder)
    assert words in str(caught.value)


def test_a_huge_file_is_not_read(folder):
    with open(folder / "tiktoken.model", "r+b") as file:
        file.truncate(2**40)  # takes no space on the disk
    with pytest.raises(TextError, match="tiktoken.model has more than 33,554,432 bytes"):
        load(folder)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"tokenizer_class": "Other"}, "tokenizer_class 'Other', but tiktoken.model is supported"),
        ({"tokenizer_class": None}, "tokenizer_class None"),
        ({"added_tokens_decoder": {"3": {"content": "x"}}}, "has the ids 3 to 3; special tokens"),
        ({"added_tokens_decoder": {"999999": {"content": "x"}}}, "ids 999,999 to 999,999"),
        (
            {"added_tokens_decoder": {"280": {"content": "<x>"}, "281": {"content": "<x>"}}},
            "the id 281, but this text already has the id 280",
        ),
        (
            {"added_tokens_decoder": {"280": {"content": "h"}}},
            "the id 280, but this text already has",
        ),
        (
            {"added_tokens_decoder": {"280": {"content": "\ud800"}}},
            "must be a token id, and its object",
        ),
        (
            {"added_tokens_decoder": {"2" * 5000: {"content": "x"}}},
            "must be a token id, and its object",
        ),
    ],
)
def test_special_tokens_that_make_no_sense_are_named(changes, words, folder):
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(TextError, match="tokenizer_config.json") as caught:
        load(folder)
    assert words in str(caught.value)


def test_tokenizer_json_is_taken_where_both_are_there(folder, tmp_path):
    other = tiktoken_folder(tmp_path / "other")
    load(other)._inner.save(str(folder / "tokenizer.json"))
    (folder / "tiktoken.model").write_bytes(b"damaged")
    assert load(folder).encode("hello world") == load(other).encode("hello world")
    shutil.rmtree(other)
