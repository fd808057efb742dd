"""Thoughts and calls in a model's text, in each published format; what is no whole call is text."""

import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxattn.cli.options.http_options import TOOL_PARSERS
from jaxattn.server.decoding.message_events import MessageParts
from jaxattn.server.decoding.message_format import FORMATS, MessageFormat
from jaxattn.server.decoding.tool_choice import read_tools
from jaxattn.server.http.errors import ApiError
from jaxattn.server.http.json_fields import JsonFields
from tests.helpers.tool_calls import (
    ANY,
    CALLS,
    JSON,
    THINK,
    THOUGHT,
    TOOLS,
    UNBEGUN,
    call,
    chosen,
    read,
)

IN_TAGS = [name for name in FORMATS if name != "harmony"]


def in_pieces(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def test_the_option_has_all_formats_and_each_has_a_call_here():
    assert set(TOOL_PARSERS) == set(FORMATS) == set(CALLS)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=20)
@given(data=st.data())
def test_a_call_may_be_cut_anywhere(name, data):
    before = "" if name == "llama3" else "One. \n"
    if name == "harmony":
        before = "<|channel|>final<|message|>One.<|end|><|start|>assistant"
    _, content, [(function, arguments)] = read(name, in_pieces(before + call(name) + "\n", data))
    assert content == before and name == "llama3" or content == "One."
    assert function == "f" and json.loads(arguments) == {"a": "1", "n": 2}


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"harmony", "llama3"}))
def test_two_calls_leave_no_white_space(name):
    text = f"{call(name)}\n{call(name, function='g_2')}\n"
    _, content, calls = read(name, [text])
    assert content == "" and [each[0] for each in calls] == ["f", "g_2"]
    assert read(name, text) == ("", "", calls)
    one = chosen(parallel_tool_calls=False)
    assert read(name, text, choice=one) == ("", "", calls[:1])


def test_formats_with_a_section_have_several_calls_in_it():
    v31 = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    both = f"<｜tool▁calls▁begin｜>{v31}\n{v31}<｜tool▁calls▁end｜>"
    assert read("deepseek_v31", both) == ("", "", [("f", "{}")] * 2)
    llama = '{"name": "f", "parameters": {}}; {"name": "g_2", "parameters": {}}'
    assert read("llama3", llama) == ("", "", [("f", "{}"), ("g_2", "{}")])
    mistral = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g_2", "arguments": {}}]'
    assert read("mistral", mistral) == ("", "", [("f", "{}"), ("g_2", "{}")])


# --- thoughts


@pytest.mark.parametrize("opened", [False, True], ids=["by the model", "by the template"])
@pytest.mark.parametrize("name", IN_TAGS)
def test_a_call_that_is_drafted_in_thoughts_is_none(name, opened):
    draft = f"Say {call(name)}? The tag is <tool_call>, or <think>."
    text = f"{'' if opened else THINK}{draft}{THOUGHT}{call(name)}"
    end = "<|assistant|>\n" + THINK if opened else "<|assistant|>\n"
    reasoning, content, calls = read(name, text, end)
    assert (reasoning, content) == (draft, "") and len(calls) == 1
    assert read(name, [text], end)[0] == draft
    unended = text.partition("</think>")[0]
    assert read(name, unended, end) == (draft, "", [])


def test_thoughts_of_harmony_are_its_analysis():
    analysis = "<|channel|>analysis<|message|>Say {}?<|end|><|start|>assistant"
    text = analysis.format("f") + call("harmony")
    reasoning, content, calls = read("harmony", text)
    assert (reasoning, content) == ("Say f?", "") and calls == [("f", JSON)]
    built_in = "<|channel|>analysis to=python code<|message|>print(1)<|call|>"
    assert read("harmony", built_in) == ("print(1)", "", [])
    switched = "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
    assert read("harmony", switched) == ("", "", [("f", "{}")])
    assert read("harmony", "just text") == ("", "just text", [])


@pytest.mark.parametrize(
    "text, seen",
    [
        ("<think>a</think>b", ("a", "b")),
        ("\n<think>\na\n\n</think>\n\nb\n", ("a", "b\n")),
        ("<think>\n\n</think>\n\nb", ("", "b")),
        ("<think>a </thin", ("a </thin", "")),
        ("<thin", ("", "<thin")),
        ("b <think>a</think>", ("", "b <think>a</think>")),  # a text that quotes the tag
        ("b</think>", ("", "b</think>")),
    ],
)
def test_thoughts_stand_in_front(text, seen):
    assert read("hermes", text)[:2] == seen == read("hermes", [text])[:2]


def test_other_models_have_other_tags_of_thoughts():
    format_ = MessageFormat.of("[SYSTEM_PROMPT] [THINK]{{ x }}[/THINK] [TOOL_CALLS] [ARGS]")
    parser, parts = format_.parser(ANY), MessageParts()
    parts.add([*parser.feed("[THINK]so[/THINK]f[ARGS]{}"), *parser.finish()])
    assert parts.reasoning == "so" and [each.name for each in parts.calls] == ["f"]


# --- values


@pytest.mark.parametrize(
    "key, text, value",
    [
        ("a", "12345", '"12345"'),
        ("a", "true", '"true"'),
        ("a", "[1]", '"[1]"'),
        ("a", "  x\n", r'"  x\n"'),
        ("b", "True", "true"),
        ("b", "false", "false"),
        ("n", str(2**64 + 1), str(2**64 + 1)),
        ("n", "9" * 5000, "9" * 5000),
        ("n", "one", '"one"'),
        ("o", "null", "null"),
        ("o", "None", '"None"'),
        ("o", "7", '"7"'),
        ("o", '"7"', r'"\"7\""'),
        ("r", "1", '"1"'),
        ("u", "7", "7"),
        ("u", "seven", '"seven"'),
        ("unknown", "7", "7"),
        ("unknown", "True", '"True"'),
        ("unknown", '{"x": 1e400}', '{"x":1e400}'),
    ],
)
def test_a_value_has_the_type_that_its_tool_declares(key, text, value):
    coder = f"<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>"
    glm = f"f<arg_key>{key}</arg_key><arg_value>{text}</arg_value>"
    for name, inner in (("qwen3_coder", coder), ("glm", glm)):
        expected = f'{{"{key}":{value}}}'
        assert read(name, f"<tool_call>{inner}</tool_call>")[2] == [("f", expected)]


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"qwen3_coder", "glm", "deepseek_v32"}))
def test_json_stays_as_it_was_written_but_for_white_space(name):
    arguments = (
        '{"n": 18446744073709551617,\n "x": 1.0e+400 , "a": "\\ud83d\\ude00 \\" </tool_call>"}'
    )
    found = '{"n":18446744073709551617,"x":1.0e+400,"a":"\\ud83d\\ude00 \\" </tool_call>"}'
    assert read(name, call(name, arguments))[2] == [("f", found)]


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"qwen3_coder", "glm", "deepseek_v32"}))
def test_end_tags_and_brackets_in_a_string_end_nothing(name):
    held = 'x </tool_call> } ] " \\ <｜tool▁call▁end｜> <|tool_call_end|> <|call|> ``` ;'
    arguments = json.dumps({"a": held}, ensure_ascii=False, separators=(",", ":"))
    assert read(name, call(name, arguments)) == ("", "", [("f", arguments)])


def test_end_tags_in_a_value_end_nothing():
    held = "use </parameter> and </function> in </tool_call>, <parameter=z> too"
    coder = f"<function=f>\n<parameter=a>\n{held}\n</parameter>\n</function>"
    held_by_glm = "use </arg_value> in </tool_call> too"
    glm = f"f<arg_key>a</arg_key><arg_value>{held_by_glm}</arg_value>"
    for name, inner, value in (("qwen3_coder", coder, held), ("glm", glm, held_by_glm)):
        _, content, [(_, arguments)] = read(name, f"<tool_call>{inner}</tool_call>")
        assert content == "" and json.loads(arguments) == {"a": value}


# --- what is no call


@pytest.mark.parametrize(
    "name, text",
    [
        ("hermes", "<tool_call>word</tool_call>"),
        ("hermes", "<tool_call>f</tool_call>"),
        ("hermes", "The tag <tool_call> begins a call."),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "name": "g_2", "arguments": {}}</tool_call>'),
        ("hermes", '{"name": "Bob", "arguments": {}}</tool_call>'),
        ("hermes", '{"name": "f", "arguments": {}} is how'),
        ("hermes", "a < b <tool"),
        ("hermes", "  spaces  "),
        ("hermes", ""),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>"),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n<parameter=n>\n2\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        ("qwen3_coder", "<function=other>\n</function>"),
        ("qwen3_coder", "<tool_call>word</tool_call>"),
        ("glm", "<tool_call>word</tool_call>"),
        ("glm", "<tool_call>f<arg_key>a</arg_key></tool_call>"),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>none<｜tool▁calls▁end｜>"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}"),
        ("deepseek_v32", '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="n" string="false">2'),
        ("deepseek_v32", call("deepseek_v32").replace("</｜DSML｜parameter>", "", 1)),
        ("deepseek_v32", call("deepseek_v32").replace(">2<", ">two<")),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_end|>"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{oh}"),
        ("llama3", '{"name": "Bob", "parameters": {}}'),
        ("llama3", '{"name": "f", "parameters": {}} is a call'),
        ("llama3", "<|python_tag|>brave.call(1)"),
        ("mistral", "[TOOL_CALLS]word"),
        ("mistral_array", '[{"name": "Bob", "arguments": {}}]'),
    ],
)
def test_what_is_no_whole_call_stays_text(name, text):
    assert read(name, text) == ("", text, []) == read(name, [text])


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm"])
def test_a_broken_call_hides_no_later_one(name):
    broken = call(name).replace("</parameter>", "", 1).replace("</arg_value>", "", 1)
    broken = broken.replace('"arguments"', "arguments")
    _, content, calls = read(name, f"{broken}\n{call(name, function='g_2')}")
    assert [each[0] for each in calls] == ["g_2"]
    assert (
        content == broken and read(name, [f"{broken}\n{call(name, function='g_2')}"])[1] == broken
    )


@pytest.mark.parametrize("name", UNBEGUN)
def test_a_call_whose_begin_mark_is_missing_is_one(name):
    text = UNBEGUN[name].replace("NAME", "f").replace("JSON", JSON)
    _, content, [(function, arguments)] = read(name, text)
    assert content == "" and function == "f" and json.loads(arguments) == json.loads(JSON)
    other = UNBEGUN[name].replace("NAME", "other").replace("JSON", JSON)
    if name in ("hermes", "qwen3_coder", "glm", "mistral", "mistral_array"):
        assert read(name, other) == ("", other, [])  # text of the same form


def test_deepseeks_markup_says_which_values_are_strings():
    values = {"true": "1\n <b> ", "false": ' {"x": [12345678901234567890]}\n'}
    texts = [
        f'<｜DSML｜parameter name="{kind}" string="{kind}">{value}</｜DSML｜parameter>'
        for kind, value in values.items()
    ]
    one = f'<｜DSML｜invoke name="f">{"".join(texts)}</｜DSML｜invoke>'
    other = '<｜DSML｜invoke name="g_2">{"a": "1"}</｜DSML｜invoke>'
    for section in ("function_calls", "tool_calls"):  # the second is DeepSeek-V4's
        text = f"So:\n\n<｜DSML｜{section}>\n{one}\n{other}\n</｜DSML｜{section}>"
        found = ('{"true":"1\\n <b> ","false":{"x":[12345678901234567890]}}', '{"a":"1"}')
        assert read("deepseek_v32", text) == (
            "",
            "So:",
            list(zip(("f", "g_2"), found, strict=True)),
        )


def test_many_begun_calls_take_no_long_time():
    text = "<tool_call>\n<function=f>\n<parameter=a>\n" * 5_000
    assert read("qwen3_coder", [text]) == ("", text, [])
    begun = time.process_time()  # of JSON that is read from each of them on: half a second
    assert read("hermes", ['<tool_call>{"a":' * 2_000])[2] == []
    assert time.process_time() - begun < 6


def test_without_tools_calls_are_text_and_thoughts_are_not():
    none = read_tools(JsonFields({"tools": TOOLS, "tool_choice": "none"}))
    for choice in (none, read_tools(JsonFields({}))):
        assert read("hermes", f"<think>so</think>{call('hermes')}", choice=choice) == (
            "so",
            call("hermes"),
            [],
        )


# --- ids, templates, choices


@pytest.mark.parametrize(
    "name, form",
    [
        ("kimi_k2", r"functions\.f:0"),
        ("mistral", r"[a-zA-Z0-9]{9}"),
        ("mistral_array", "abcdef123"),
    ],
)
def test_an_id_has_the_form_that_the_template_expects(name, form):
    parser = MessageFormat.of("", name).parser(ANY)
    [found] = [*parser.feed(call(name)), *parser.finish()]
    assert re.fullmatch(form, found.id)


@pytest.mark.parametrize(
    "template, name",
    [
        ("<tool_call>\n{'name'", "hermes"),
        ("<tool_call> <function=x> <parameter=y>", "qwen3_coder"),
        ("<tool_call> <arg_key>", "glm"),
        ("<｜tool▁calls▁begin｜> ```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("<｜DSML｜function_calls> <｜tool▁calls▁begin｜>", "deepseek_v32"),
        ("<|tool_call_begin|>", "kimi_k2"),
        ("<|im_system|>tool_declare<|im_middle|>", "kimi_k2"),
        ("<|channel|> <|message|>", "harmony"),
        ('<|start_header_id|> {"name": x, "parameters": y}', "llama3"),
        ("[TOOL_CALLS] [ARGS]", "mistral"),
        ("[TOOL_CALLS]", "mistral_array"),
        ("", "hermes"),
    ],
)
def test_a_format_is_recognized_from_the_template(template, name):
    assert MessageFormat.of(template).style.name == name
    assert MessageFormat.of(template, "llama3").style.name == "llama3"


NAMED = {"type": "function", "function": {"name": "f"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}


@pytest.mark.parametrize(
    "choice, mode, functions",
    [
        ("auto", "auto", ["f", "g_2"]),
        ("required", "required", ["f", "g_2"]),
        (NAMED, "required", ["f"]),
        ({"type": "function", "name": "f"}, "required", ["f"]),
        (ALLOWED, "auto", ["f"]),
        ({"type": "allowed_tools", "mode": "required", "tools": [NAMED]}, "required", ["f"]),
    ],
)  # fmt: skip
def test_a_choice_says_what_may_be_called(choice, mode, functions):
    found = chosen(tool_choice=choice)
    assert found.mode == mode and len(found.tools) == 2
    assert [tool["function"]["name"] for tool in found.functions] == functions
    assert found.parallel == ("function" not in str(choice) or "allowed" in str(choice))


@pytest.mark.parametrize(
    "choice",
    [
        "f",
        {"type": "function", "function": {"name": "h"}},
        {"type": "allowed_tools", "allowed_tools": {"tools": []}},
        {"type": "allowed_tools", "allowed_tools": {"tools": [{"name": "h"}]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "always", "tools": [NAMED]}},
    ],
)
def test_a_choice_of_what_is_not_there_is_400(choice):
    with pytest.raises(ApiError) as refused:
        chosen(tool_choice=choice)
    assert refused.value.status == 400 and refused.value.param.startswith("tool_choice")
