"""Answers in the terminal: thoughts are dim and stand between their tags."""

import pytest

from jaxattn.cli.serve.styled_message import THOUGHTS, MessageText
from jaxattn.text import ByteTokenizer


class Thinker(ByteTokenizer):
    chat_template = "<think> </think>"


def shown(text: str, prompt: str = "") -> tuple[str, str, MessageText]:
    """(what is dim, what is not) of a text, a byte at a time."""
    made = MessageText(Thinker(), prompt.encode())
    pieces = [piece for byte in text.encode() for piece in made.push(byte)] + made.end()
    dim = "".join(text for text, style in pieces if style == THOUGHTS)
    plain = "".join(text for text, style in pieces if style is None)
    assert len(dim) + len(plain) == sum(len(text) for text, _ in pieces)
    return dim, plain, made


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("<think>\nIs it é?\n</think>\n\nYes.\n", ""),
        ("Is it é?\n</think>Yes.\n", "assistant: <think>\n"),
    ],
)
def test_thoughts_are_dim_and_apart_in_the_history(text, prompt):
    dim, plain, made = shown(text, prompt)
    assert dim == "<think>\nIs it é?\n</think>\n\n" and plain == "Yes.\n"
    assert made.message == {
        "role": "assistant",
        "content": "Yes.\n",
        "reasoning_content": "Is it é?",
    }


def test_a_cut_thought_has_no_end(capsys):
    dim, plain, made = shown("<think>so", "")
    assert (dim, plain) == ("<think>\nso", "")
    assert made.message == {"role": "assistant", "content": "", "reasoning_content": "so"}


def test_text_without_thoughts_is_as_it_was_written():
    for text in (" a <tool_call>\n", "x </think> y", "", "<thin", "\n\n"):
        dim, plain, made = shown(text)
        assert (dim, plain, made.message["content"]) == ("", text, text)
