"""Chats are written as transformers writes them, from messages as OpenAI's clients send them."""

import datetime
import json
import re

import pytest

from jaxattn.text import TextError, load
from jaxattn.text.chat_template import ChatTemplate, flattened, known_roles
from jaxattn.text.renderer_process import RendererProcess
from jaxattn.text.template_renderer import render
from jaxattn.text.tokenizer_config import read_settings
from tests.helpers.chat_cases import ARGUMENTS, CASES, DATA, EXPECTED, NAMES, SPECIAL
from tests.helpers.text_cases import byte_level, write_folder

TINY = DATA.parent / "tiny_checkpoints" / "deepseek_v3"
HELLO = [{"role": "user", "content": "hello"}]


def rendered(source, messages=HELLO, **variables):
    """In this process; the templates are ours."""
    given = {"tools": None, "add_generation_prompt": True, **variables}
    return render(source, {**given, "messages": flattened(messages)}, 10**6)


@pytest.fixture(scope="module")
def tiny():
    return load(TINY)


@pytest.fixture
def folder(tmp_path):
    """A tokenizer without a template."""
    return write_folder(tmp_path / "model", byte_level())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_templates_render_as_transformers_renders_them(name, case):
    messages, tools, prompt, variables = CASES[case]
    given = {"tools": tools, "add_generation_prompt": prompt, **SPECIAL, **variables}
    expected = json.loads(EXPECTED.read_text())[name][case]
    assert rendered((DATA / f"{name}.jinja").read_text(), messages, **given) == expected


@pytest.mark.parametrize(
    "messages, seen",
    [
        ([("developer", "Be brief.")], [("system", "Be brief.")]),
        ([("system", "A."), ("developer", "B.")], [("system", "A.\n\nB.")]),
        ([("user", "x"), ("developer", "B.")], [("user", "x"), ("system", "B.")]),
    ],
)
def test_a_developer_speaks_as_system_where_the_template_knows_only_that(messages, seen):
    given = [{"role": role, "content": content} for role, content in messages]
    found = known_roles(given, (DATA / "qwen.jinja").read_text())
    assert [(each["role"], each["content"]) for each in found] == seen
    assert known_roles(given, "{% if role == 'developer' %}") == given
    text = rendered((DATA / "qwen.jinja").read_text(), found)
    assert all(content in text for _, content in messages)


def test_a_chat_is_encoded_as_it_is_rendered_with_nothing_added(tiny):
    tokens = tiny.chat(HELLO)
    text = "<|user|>hello<|im_end|><|assistant|><think>"
    assert tiny.decode(tokens, skip_special_tokens=False) == text
    assert tokens == tiny.encode(text)
    assert tokens.count(427) == 1  # <|im_end|> is one token
    assert tiny.chat(HELLO, enable_thinking=False)[-2:] == [428, 429]
    assert tiny.has_chat_template


def test_bos_stands_once_where_the_template_writes_it(folder):
    config = {"bos_token": "<｜begin｜>", "add_bos_token": True}
    config["chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer = load(write_folder(folder, None, tokenizer_config=config))
    assert tokenizer.chat(HELLO) == tokenizer.encode("hello")
    shown = tokenizer.decode(tokenizer.chat(HELLO), skip_special_tokens=False)
    assert shown == "<｜begin｜>hello"


@pytest.mark.parametrize("empty", [False, True], ids=["missing", "empty"])
def test_a_folder_without_a_template_says_so(folder, empty):
    if empty:
        (folder / "chat_template.jinja").touch()
        write_folder(folder, None, tokenizer_config={"chat_template": ""})
    tokenizer = load(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(TextError, match=f"{folder} has no chat template: add chat_template.jinja"):
        tokenizer.chat(HELLO)


def chosen(folder, **found):
    template = ChatTemplate(read_settings(folder))
    return template.choose(**found).source


def test_a_file_of_its_own_wins_over_tokenizer_config(folder):
    write_folder(folder, None, tokenizer_config={"chat_template": "config"})
    assert chosen(folder, tools=False) == "config"
    (folder / "chat_template.jinja").write_text("file")
    assert chosen(folder, tools=False) == chosen(folder, tools=True) == "file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("use")
    assert chosen(folder, tools=False) == "file"
    assert chosen(folder, tools=True) == "use"


def test_of_several_templates_tools_choose_tool_use(folder):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write_folder(folder, None, tokenizer_config={"chat_template": named})
    assert chosen(folder, tools=False) == "plain"
    assert chosen(folder, tools=True) == "tools"
    write_folder(folder, None, tokenizer_config={"chat_template": named[:1]})
    assert chosen(folder, tools=True) == "plain"
    write_folder(folder, None, tokenizer_config={"chat_template": named[1:]})
    with pytest.raises(TextError, match="named tool_use, but none named default"):
        chosen(folder, tools=False)


@pytest.mark.parametrize("value", [7, [], [1], [{"name": "default"}], [{"name": 1, "template": 2}]])
def test_a_chat_template_of_another_form_is_named(value, folder):
    write_folder(folder, None, tokenizer_config={"chat_template": value})
    with pytest.raises(
        TextError, match=r"tokenizer_config.json: chat_template must be a string or"
    ):
        load(folder)


@pytest.mark.parametrize("content", [b"\xff", b"a" * (2**20 + 1)])
def test_a_template_file_that_is_no_text_or_huge_is_named(content, folder):
    (folder / "chat_template.jinja").write_bytes(content)
    with pytest.raises(TextError, match="chat_template.jinja (is damaged|has more than 1,048,576)"):
        load(folder)


def test_a_hostile_template_of_a_folder_is_stopped_and_named(folder):
    loop = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    (folder / "chat_template.jinja").write_text(loop)
    template = ChatTemplate(read_settings(folder), RendererProcess(seconds=0.3))
    with pytest.raises(TextError, match="chat_template.jinja did not finish within 0.3 s"):
        template.render(HELLO)


def test_json_is_written_as_in_training():
    value = {"b": "<'&\">", "a": ["天", 1.5, None, True]}
    assert rendered("{{ v | tojson }}", v=value) == json.dumps(value, ensure_ascii=False)
    assert rendered("{{ v | tojson(ensure_ascii=true) }}", v=value) == json.dumps(value)
    assert rendered("{{ v | tojson(indent=2, sort_keys=true) }}", v=value) == json.dumps(
        value, ensure_ascii=False, indent=2, sort_keys=True
    )


def test_blocks_leave_no_blank_lines():
    assert rendered("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_loops_can_be_left_and_the_generation_tag_does_nothing():
    source = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}"
    source += "{% break %}{% endif %}{% generation %}{{ i }}{% endgeneration %}{% endfor %}"
    assert rendered(source) == "023"
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert rendered(source) == "21"  # a scope of its own, as transformers makes of it


def test_the_date_is_todays():
    before, found = datetime.date.today(), rendered("{{ strftime_now('%Y-%m-%d') }}")
    assert found in (str(before), str(datetime.date.today()))


@pytest.mark.parametrize(
    "arguments, mapping, text",
    [
        (ARGUMENTS[0], "city=Zürich & <b>;days=2;units=['°C', None];", ARGUMENTS[0]),
        ('{"a":1}', "a=1;", '{"a":1}'),
        ({"a": 1}, "a=1;", '{"a": 1}'),
        ("", "", ""),
    ],
)
def test_arguments_are_a_mapping_and_a_text(arguments, mapping, text):
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    begin = "{% set a = messages[0].tool_calls[0].function.arguments %}"
    assert rendered(begin + "{{ a is mapping }} {{ a is string }}", messages) == "True False"
    loop = "{% for k, v in a|items %}{{ k }}={{ v }};{% endfor %}"
    assert rendered(begin + loop, messages) == mapping
    assert rendered(begin + "{{ '[' + a + ']' }}", messages) == f"[{text}]"
    assert rendered(begin + "{{ '[' ~ a ~ ']' }}{{ a }}", messages) == f"[{text}]{text}"
    as_json = json.dumps(json.loads(text or "{}"), ensure_ascii=False)
    assert rendered(begin + "{{ a | tojson }}", messages) == as_json


@pytest.mark.parametrize("arguments", ["no JSON", "[1]", "3"])
def test_arguments_that_are_no_object_stay_a_text(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    source = "{% set a = messages[0].tool_calls[0].function.arguments %}{{ a is string }}{{ a }}"
    assert rendered(source, messages) == f"True{arguments}"


@pytest.mark.parametrize("message", [{"role": "assistant", "content": None}, {"role": "assistant"}])
def test_a_message_without_content_is_none_and_an_empty_text(message):
    begin = "{% set c = messages[0].content %}"
    assert rendered(begin + "{{ c is none }}{{ c == none }}{{ c is string }}", [message]) == (
        "TrueTrueTrue"
    )
    assert rendered(begin + "[{{ c }}{{ c + '' }}{{ c.strip() }}{{ c or '' }}]", [message]) == "[]"


def test_an_empty_content_is_none_only_beside_calls():
    call = {"function": {"name": "f", "arguments": "{}"}}
    source = "{{ messages[0].content is none }}"
    empty = {"role": "assistant", "content": ""}
    assert rendered(source, [empty]) == "False"
    assert rendered(source, [{**empty, "tool_calls": []}]) == "False"
    assert rendered(source, [{**empty, "tool_calls": [call]}]) == "True"
    assert rendered(source, [{**empty, "tool_calls": [call], "content": "a"}]) == "False"


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "a\n"}, "b", {"type": "input_text", "text": "c"}]
    assert flattened([{"role": "user", "content": parts}])[0]["content"] == "a\nbc"
    assert flattened([{"role": "user", "content": []}])[0]["content"] == ""


@pytest.mark.parametrize(
    "messages, words",
    [
        ([], "a chat must have at least one message"),
        ([{"content": "a"}], "messages[0] must be an object with a string `role`"),
        (["hello"], "messages[0] must be an object"),
        ([*HELLO, {"role": "user", "content": 3}], "messages[1].content must be a string, a list"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content has a part of type 'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "a part of type 'text'"),
        ([{"role": "user", "content": [None]}], "a part of type 'NoneType'"),
    ],
)
def test_messages_of_another_form_are_refused_by_place(messages, words, tiny):
    with pytest.raises(TextError, match=re.escape(words)):
        tiny.chat(messages)


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('x' * 10**6) }}", "{% " + "x" * 10**5, "{{ '" + "x" * 10**5]
)
def test_what_a_template_says_is_cut(source, folder):
    (folder / "chat_template.jinja").write_text(source)
    with pytest.raises(TextError) as refused:
        load(folder).chat([{"role": "user", "content": "hi"}])
    assert len(str(refused.value)) < 1000


def test_a_role_that_the_template_does_not_know_is_its_refusal(folder):
    (folder / "chat_template.jinja").write_text((DATA / "qwen.jinja").read_text())
    with pytest.raises(
        TextError, match="chat_template.jinja rejected the messages: no role oracle"
    ):
        load(folder).chat([{"role": "oracle", "content": "hi"}])
