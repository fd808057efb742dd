"""Folders load as they are published; a damaged file is named; stop tokens and BOS are right."""

import json
import os
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, processors

from jaxattn.text import ByteTokenizer, SamplingDefaults, TextError, Tokenizer, load
from tests.helpers.text_cases import byte_fallback, byte_level, metaspace, write_folder

TINY = Path(__file__).parents[1] / "data" / "tiny_checkpoints"
BEGIN, END = "<｜begin｜>", "<|end|>"


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model", byte_level())


@pytest.mark.parametrize("name", ["deepseek_v3", "youtu"])
def test_published_layouts_load(name):
    tokenizer = load(str(TINY / name))
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.vocab_size, tokenizer.stop_tokens) == (430, (1, 425))
    assert tokenizer.defaults == SamplingDefaults(temperature=0.6, top_p=0.95)
    text = "Hello  world, it's 你好🙂\n"
    inner = Inner.from_file(str(TINY / name / "tokenizer.json"))
    assert tokenizer.encode(text) == inner.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("build", [byte_level, byte_fallback, metaspace])
def test_all_spellings_come_back(build, tmp_path):
    tokenizer = load(write_folder(tmp_path / "model", build()))
    assert tokenizer.decode(tokenizer.encode("hello  world 中")).split() == ["hello", "world", "中"]


def test_decoders_that_a_converter_from_gguf_stacks(tmp_path):
    """transformers stacks those of SentencePiece on ByteLevel. Its whole text is decoded; here
    token by token."""
    inner = byte_level()
    stack = [
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Replace("▁", " "),
        decoders.ByteLevel(add_prefix_space=False, trim_offsets=False),
    ]
    inner.decoder = decoders.Sequence(stack)
    tokenizer = load(write_folder(tmp_path / "model", inner))
    text = "Hello  world, naïve 你好🙂\n"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == inner.decode(tokens) == text
    plain = load(write_folder(tmp_path / "plain", byte_level()))
    assert [*map(tokenizer.token_bytes, tokens)] == [*map(plain.token_bytes, tokens)]
    assert tokenizer.decode([*tokens, *tokenizer.encode(END), *tokens]) == text + text


def test_a_mark_that_is_replaced_in_joined_text(tmp_path):
    inner = byte_fallback()
    stack = [
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Replace("▁", " "),
        decoders.Strip(" ", 1, 0),
    ]
    inner.decoder = decoders.Sequence(stack)
    tokenizer = load(write_folder(tmp_path / "model", inner))
    tokens = tokenizer.encode("hello  world 中é")
    assert tokenizer.decode(tokens) == inner.decode(tokens) == "hello  world 中é"


def test_stop_tokens_are_those_of_all_files(folder):
    write_folder(folder, None, config={"eos_token_id": 3}, generation_config={"eos_token_id": 7})
    assert load(folder).stop_tokens == (3, 7)
    write_folder(folder, None, generation_config={"eos_token_id": [9, 7, 9, 3]})
    assert load(folder).stop_tokens == (3, 7, 9)
    write_folder(folder, None, tokenizer_config={"eos_token": END})
    assert load(folder).stop_tokens == tuple(sorted({3, 7, 9, *load(folder).encode(END)}))
    write_folder(folder, None, tokenizer_config={"eos_token": "<missing>"})
    assert load(folder).stop_tokens == (3, 7, 9)
    write_folder(folder, None, generation_config={"temperature": 1})
    assert load(folder).stop_tokens == (3,)
    write_folder(folder, None, config={"text_config": {"eos_token_id": [5, 4]}})
    assert load(folder).stop_tokens == (4, 5)


def test_without_them_the_tokenizers_own_eos_stops(folder):
    assert load(folder).stop_tokens == ()
    end = load(folder).encode(END)
    for value in (END, {"content": END, "special": True}):
        write_folder(folder, None, tokenizer_config={"eos_token": value})
        assert list(load(folder).stop_tokens) == end
    write_folder(folder, None, tokenizer_config={"eos_token": "<missing>"})
    with pytest.raises(
        TextError, match="eos_token of tokenizer_config.json must be a token .* got '<mis"
    ):
        load(folder)


def test_a_stop_token_is_not_shown_though_it_is_not_special(folder):
    inner = byte_level()
    stop = inner.token_to_id("<think é>")
    write_folder(folder, None, generation_config={"eos_token_id": stop})
    assert load(folder).decode([stop]) == ""


def test_bos_stands_first_where_the_files_say_so(folder):
    plain = load(folder).encode("hello")
    [bos] = load(folder).encode(BEGIN)
    write_folder(folder, None, tokenizer_config={"bos_token": BEGIN, "add_bos_token": True})
    assert load(folder).encode("hello") == [bos, *plain]
    assert load(folder).encode(BEGIN + "hello") == [bos, *plain]  # not twice
    assert load(folder).encode("") == [bos]
    write_folder(folder, None, tokenizer_config={"add_bos_token": True})
    with pytest.raises(
        TextError, match="bos_token of tokenizer_config.json must be a token .*; got None"
    ):
        load(folder)


def test_tokenizer_jsons_own_bos_holds_unless_the_config_says_otherwise(folder):
    inner = byte_level()
    bos = inner.token_to_id(BEGIN)
    inner.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, bos)]
    )
    plain = inner.encode("hello", add_special_tokens=False).ids
    write_folder(folder, inner)
    for says, expected in [(None, [bos, *plain]), (True, [bos, *plain]), (False, plain)]:
        config = {"bos_token": BEGIN, "add_bos_token": says}
        write_folder(folder, None, tokenizer_config=config)
        assert load(folder).encode("hello") == expected


@pytest.mark.parametrize("says", [None, True, False])
def test_what_tokenizer_jsons_rule_writes_behind_a_prompt_stays(folder, says):
    """As Qwen3-Embedding has it, whose tokenizer_config.json says that there is no BOS."""
    inner = byte_level()
    bos = end = inner.token_to_id(BEGIN)
    inner.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A {BEGIN}", special_tokens=[(BEGIN, bos)]
    )
    plain = inner.encode("hello", add_special_tokens=False).ids
    config = {"bos_token": BEGIN, "add_bos_token": says}
    write_folder(folder, inner, tokenizer_config=config)
    begin = [] if says is False else [bos]
    assert load(folder).encode("hello") == [*begin, *plain, end]


def test_no_prompt_is_cut_or_padded(folder):
    inner = byte_level()
    inner.enable_truncation(4)
    inner.enable_padding(length=50)
    assert len(inner.encode("hello " * 9).ids) == 50
    tokenizer = load(write_folder(folder, inner))
    assert tokenizer.decode(tokenizer.encode("hello " * 9)) == "hello " * 9
    assert len(tokenizer.encode("a")) == 1


def test_halves_of_surrogate_pairs_are_no_crash(folder):
    tokenizer = load(folder)
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude42")) == "🙂"


def test_ids_beyond_gaps_are_counted(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["zz"] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load(folder)
    assert tokenizer.vocab_size == 5001
    assert tokenizer.decode([4000, 5000]) == "zz"


def test_the_bytes_of_tokens_are_those_of_the_text(folder):
    tokenizer = load(folder)
    tokens = tokenizer.encode("naïve 🙂 x<|im_end|>")
    assert b"".join(map(tokenizer.token_bytes, tokens)).decode() == "naïve 🙂 x<|im_end|>"
    assert ByteTokenizer().token_bytes(200) == b"\xc8"


def test_sampling_defaults_are_read(folder):
    values = {"temperature": 1, "top_p": 0.8, "top_k": 20, "min_p": 0.0, "do_sample": True}
    write_folder(folder, None, generation_config=values)
    expected = SamplingDefaults(temperature=1.0, top_p=0.8, top_k=20, min_p=0.0)
    assert load(folder).defaults == expected
    write_folder(folder, None, generation_config={"top_k": 0, "top_p": None})
    assert load(folder).defaults == SamplingDefaults()
    write_folder(folder, None, generation_config={"repetition_penalty": 1.05})
    assert load(folder).defaults == SamplingDefaults(repetition_penalty=1.05)


@pytest.mark.parametrize("values, temperature", [
    ({"do_sample": False, "temperature": 0.7}, 0.0),
    ({"do_sample": False}, 0.0),
    ({"do_sample": True, "temperature": 0.7}, 0.7),
    ({"do_sample": True}, 1.0),
    ({"do_sample": None, "temperature": 0.7}, 0.7),
    ({}, None),
])  # fmt: skip
def test_do_sample_says_whether_the_model_draws(folder, values, temperature):
    write_folder(folder, None, generation_config=values)
    assert load(folder).defaults == SamplingDefaults(temperature=temperature)


GENERATION, CONFIG, TOKENIZER = "generation_config", "config", "tokenizer_config"
WRONG = [
    (GENERATION, {"eos_token_id": "x"}, "eos_token_id must be an id from 0"),
    (GENERATION, {"eos_token_id": [1, None]}, "eos_token_id must be an id from 0"),
    (GENERATION, {"eos_token_id": True}, "eos_token_id must be an id from 0"),
    (GENERATION, {"eos_token_id": -1}, "got -1"),
    (GENERATION, {"temperature": "1"}, "temperature must be a number of at least 0; got '1'"),
    (GENERATION, {"temperature": float("nan")}, "must be a number of at least 0; got nan"),
    (GENERATION, {"top_p": 0}, "top_p must be a number above 0 and at most 1; got 0"),
    (GENERATION, {"top_k": 1.5}, "top_k must be an integer of at least -1; got 1.5"),
    (GENERATION, {"min_p": 2}, "min_p must be a number from 0 to 1; got 2"),
    (GENERATION, {"do_sample": 1}, "do_sample must be true or false; got 1"),
    (GENERATION, {"repetition_penalty": 0}, "repetition_penalty must be a number from 0.01 to 100"),
    (CONFIG, {"eos_token_id": 1.0}, "eos_token_id must be an id from 0"),
    (CONFIG, {"vocab_size": "big"}, "vocab_size must be an integer from 0"),
    (CONFIG, {"text_config": []}, "text_config must be an object; got []"),
    (
        TOKENIZER,
        {"bos_token": 3},
        "bos_token must be a string or an object with a string `content`",
    ),
    (TOKENIZER, {"bos_token": {"content": None}}, "bos_token must be a string or an object"),
    (TOKENIZER, {"add_bos_token": "yes"}, "add_bos_token must be true or false; got 'yes'"),
    (TOKENIZER, {"tokenizer_class": 1}, "tokenizer_class must be a string"),
    (TOKENIZER, {"additional_special_tokens": "x"}, "must be a list of tokens"),
    (TOKENIZER, {"added_tokens_decoder": {"x": {"content": "a"}}}, "must be a token id, and"),
    (TOKENIZER, {"added_tokens_decoder": {"1": {"content": ""}}}, "must have a nonempty `content`"),
    (TOKENIZER, {"added_tokens_decoder": {"1": 7}}, "1 must be an object; got 7"),
]


@pytest.mark.parametrize("name, values, words", WRONG)
def test_a_field_of_another_type_is_named_with_its_file(name, values, words, folder):
    write_folder(folder, None, **{name: values})
    with pytest.raises(TextError, match=f"{name}.json: ") as caught:
        load(folder)
    assert words in str(caught.value)


DAMAGED = {
    "no JSON": (b"hello", "is not JSON"),
    "empty": (b"", "is empty: copy it again, or remove it"),
    "no text": (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
    "a list": (b"[]", "must contain a JSON object; got list"),
    "nested": (b'{"a":' * 100_000, "nested too deeply"),
    "a long number": (b'{"a": ' + b"1" * 5000 + b"}", "is not JSON"),
}
FILES = [f"{name}.json" for name in (GENERATION, CONFIG, TOKENIZER, "tokenizer")]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named(name, file, folder):
    content, words = DAMAGED[name]
    (folder / file).write_bytes(content)
    with pytest.raises(TextError, match=re.escape(str(folder / file))) as caught:
        load(folder)
    assert words in str(caught.value)


@pytest.mark.parametrize("file", FILES)
def test_a_huge_file_or_a_folder_in_its_place_is_named(file, folder):
    with open(folder / file, "wb") as content:
        content.truncate(2**40)  # takes no space on the disk
    with pytest.raises(TextError, match=f"{file} has more than 104,857,600 bytes"):
        load(folder)
    (folder / file).unlink()
    (folder / file).mkdir()
    with pytest.raises(TextError, match=f"{file} cannot be read"):
        load(folder)


@pytest.mark.parametrize("file", [*FILES, "chat_template.jinja"])
def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(file, folder):
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    with pytest.raises(TextError, match=f"{file} cannot be read: it is not a regular file"):
        load(folder)


def test_a_pattern_that_takes_too_long_is_an_error_of_the_text(folder, capfd):
    values = json.loads((folder / "tokenizer.json").read_text())
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    values["pre_tokenizer"] = pattern | {"invert": False}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    tokenizer = load(folder)
    with pytest.raises(TextError, match="tokenizer.json cannot encode the text: Onig"):
        tokenizer.encode("a" * 5000 + "b")
    assert tokenizer.encode("b") == load(folder).encode("b")


def test_a_tokenizer_json_cut_off_anywhere_is_damaged(folder):
    content = (folder / "tokenizer.json").read_bytes()
    for length in (1, len(content) // 2, len(content) - 2):
        (folder / "tokenizer.json").write_bytes(content[:length])
        with pytest.raises(TextError, match="tokenizer.json is damaged"):
            load(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"model": None},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}},
        {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
        {"model": {"type": "BPE", "vocab": [], "merges": {}}},
        {"added_tokens": [{"id": "x"}]},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},  # a panic of Rust
        {"version": "1" * 100_000},
    ],
)
def test_a_tokenizer_json_that_the_library_refuses_is_named(change, folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | change))
    with pytest.raises(TextError, match="tokenizer.json is damaged: ") as refused:
        load(folder)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("merges", [[["\u0120", "\u0120a"]], ["\u0120 \u0120a"], [[]], [7]])
def test_merges_on_which_the_library_ends_the_process_are_refused(merges, folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"] |= {"continuing_subword_prefix": "x", "merges": merges}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TextError, match="tokenizer.json is damaged: merge .* lacks the prefix 'x'"):
        load(folder)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "b")]),
        decoders.Sequence([decoders.Fuse(), decoders.ByteLevel(), decoders.Replace("▁", " ")]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
        decoders.Sequence([]),
    ],
)
def test_a_decoder_that_streams_cannot_follow_is_refused_by_name(decoder, folder):
    inner = Inner(models.BPE({"a": 0}, []))
    if decoder is not None:
        inner.decoder = decoder
    write_folder(folder, inner)
    with pytest.raises(TextError, match="tokenizer.json: a decoder of .* is not supported"):
        load(folder)


@pytest.mark.parametrize(
    "decoder", [{"type": "Metaspace"}, {"type": "Sequence", "decoders": [{"type": "Replace"}]}]
)
def test_a_decoder_that_lacks_a_field_is_damaged(decoder, folder):
    content = json.loads((folder / "tokenizer.json").read_text()) | {"decoder": decoder}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TextError, match="tokenizer.json is damaged"):
        load(folder)


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(TextError, match="missing is not a folder"):
        load(tmp_path / "missing")
    with pytest.raises(TextError, match="has neither tokenizer.json nor tiktoken.model"):
        load(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(TextError, match="has tokenizer.model, but no tokenizer.json: create one"):
        load(tmp_path)


def test_a_byte_tokenizer_has_no_chat():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.stop_tokens) == (256, (0,))
    assert not tokenizer.has_chat_template
    with pytest.raises(TextError, match="a byte-level model has no chat template"):
        tokenizer.chat([{"role": "user", "content": "a"}])
