"""Streamed text is the text of the whole for every sequence of tokens, and no character is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxattn.text import ByteTokenizer, TokenStream, load
from tests.helpers.text_cases import SPELLINGS, write_folder

TEXT = st.text(alphabet="helo wrdabc中é🙂\n▁ ", max_size=30)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Each spelling's tokenizer, and the library's own beside it."""
    found = {}
    for name, build in SPELLINGS.items():
        inner = build()
        found[name] = load(write_folder(tmp_path_factory.mktemp(name), inner)), inner
    return found


def emitted(stream, tokens):
    return [*map(stream.push, tokens), stream.end()]


@pytest.mark.parametrize("name", SPELLINGS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tokens_stream_to_the_text_of_the_whole(name, loaded, data):
    tokenizer, _ = loaded[name]
    ids = st.integers(0, tokenizer.vocab_size + 3)
    tokens = data.draw(st.lists(ids, max_size=40))
    for skip in (True, False):
        whole = tokenizer.decode(tokens, skip_special_tokens=skip)
        parts = emitted(tokenizer.stream(skip_special_tokens=skip), tokens)
        assert "".join(parts) == whole


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_bytes_decode_as_the_library_decodes_them_whatever_they_are(loaded, data):
    tokenizer, inner = loaded["bytes"]
    # Of the added tokens, "<think é>" is not bytes to us: the library reads its é as byte 0xE9.
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 2), max_size=40))
    assert tokenizer.decode(tokens) == inner.decode(tokens)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_metaspace_decodes_as_the_library_does(loaded, data):
    tokenizer, inner = loaded["metaspace"]
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert tokenizer.decode(tokens) == inner.decode(tokens)


@pytest.mark.parametrize("name", SPELLINGS)
@settings(max_examples=150, deadline=None)
@given(text=TEXT)
def test_no_half_character_is_shown_and_none_is_lost(name, loaded, text):
    tokenizer, inner = loaded[name]
    tokens = inner.encode(text, add_special_tokens=False).ids
    whole = inner.decode(tokens)
    shown = ""
    for piece in emitted(tokenizer.stream(), tokens):
        shown += piece
        assert whole.startswith(shown)
    assert shown == whole
    if name == "bytes":
        assert whole == text


def test_a_character_of_four_tokens_comes_with_the_last():
    tokens = "🙂".encode()
    assert emitted(ByteTokenizer().stream(), tokens) == ["", "", "", "🙂", ""]


@pytest.mark.parametrize(
    "data, pieces",
    [
        (b"a\xf0\x9f", ["a", "", "", "\ufffd"]),
        (b"\xf0\x9fa", ["", "", "\ufffda", ""]),
        (b"\xff\xe4\xbd", ["\ufffd", "", "", "\ufffd"]),
        (b"\xed\xa0\x80", ["", "", "\ufffd\ufffd\ufffd", ""]),  # half of a surrogate pair
    ],
)
def test_bytes_that_are_no_text_are_shown_as_such_and_stop_nothing(data, pieces):
    assert emitted(ByteTokenizer().stream(), data) == pieces


def test_a_run_of_byte_tokens_keeps_its_whole_characters(loaded):
    tokenizer, inner = loaded["fallback"]
    run = [inner.token_to_id(f"<0x{byte:02X}>") for byte in "你".encode() + b"\xff"]
    assert tokenizer.decode(run) == "你\ufffd"
    assert tokenizer.decode(run[:3]) == inner.decode(run[:3]) == "你"


def test_special_tokens_within_a_character_do_not_break_it(loaded):
    tokenizer, inner = loaded["bytes"]
    one, two, three = (inner.token_to_id(byte) for byte in "ä½ł")  # bytes E4, BD and A0
    end = inner.token_to_id("<|im_end|>")
    assert emitted(tokenizer.stream(), [one, end, two, three]) == ["", "", "", "你", ""]


def test_a_continuation_keeps_the_space_that_a_beginning_loses(loaded):
    for name in ("fallback", "metaspace"):
        tokenizer, inner = loaded[name]
        tokens = inner.encode("hello", add_special_tokens=False).ids
        assert tokenizer.decode(tokens) == "hello"
        assert "".join(emitted(tokenizer.stream(continues=True), tokens)) == " hello"


def test_only_the_first_space_is_stripped_and_only_at_the_beginning(loaded):
    tokenizer, inner = loaded["fallback"]
    space, double, letter = (inner.token_to_id(t) for t in ("▁", "▁▁", "a"))
    byte = inner.token_to_id("<0x20>")
    for tokens in ([double, letter], [space, space, letter], [byte, byte, letter, space, letter]):
        assert tokenizer.decode(tokens) == inner.decode(tokens)
        assert tokenizer.decode(tokens).startswith(" a")


def test_unknown_ids_have_no_text(loaded):
    for tokenizer, inner in loaded.values():
        tokens = inner.encode("hello").ids
        padded = [tokenizer.vocab_size, *tokens, 10**9, -1]
        assert tokenizer.decode(padded) == tokenizer.decode(tokens)
        assert tokenizer.token_bytes(10**9) == tokenizer.token_bytes(-1) == b""


def test_special_tokens_are_shown_only_when_asked_for(loaded):
    for tokenizer, inner in loaded.values():
        tokens = [inner.token_to_id("<|im_end|>"), inner.token_to_id("<｜begin｜>")]
        assert tokenizer.decode(tokens) == ""
        assert tokenizer.decode(tokens, skip_special_tokens=False) == "<|im_end|><｜begin｜>"


def test_an_added_token_that_is_not_special_is_text(loaded):
    tokenizer, inner = loaded["bytes"]
    assert tokenizer.decode([inner.token_to_id("<think é>")]) == "<think é>"


def test_each_token_is_looked_at_once_however_long_the_text_is():
    seen = []

    def piece(token, first):
        seen.append((token, first))
        return b"\x80"  # never a character

    stream = TokenStream(piece)
    for token in range(1000):
        stream.push(token)
    assert seen == [(token, token == 0) for token in range(1000)]


def test_byte_models_show_all_bytes_but_the_stop():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("a\n 中")) == "a\n 中"
    assert tokenizer.decode([65, 0, 66]) == "AB"
    assert tokenizer.decode([65, 0, 66], skip_special_tokens=False) == "A\0B"
    assert bytes(tokenizer.encode("\udcff\udc80")) == b"\xff\x80"  # bytes of a command line
    assert tokenizer.encode("\ud800") == list("\ufffd".encode())
