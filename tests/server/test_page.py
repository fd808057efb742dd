"""The page at /: it chats, streams, stops, goes on and plots; nothing of a text becomes markup."""

import json
import re

import pytest

from jaxattn.server.chat_page import PAGE, page_files
from tests.helpers import browser
from tests.helpers.live_server import live, served
from tests.helpers.scripted_engine import ScriptedEngine

needs_chromium = pytest.mark.skipif(
    browser.installed() is None, reason="needs a headless Chromium, such as Debian's chromium"
)
FILES = {path.relative_to(PAGE).as_posix(): path.read_text() for path in page_files().values()}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser.page(browser.installed(), tmp_path_factory.mktemp("profile")) as tab:
        yield tab


# --- files


def test_the_page_needs_nothing_from_elsewhere(scripted):
    response = scripted.client.get("/")
    policy = response.headers["content-security-policy"].split("; ")
    assert "default-src 'none'" in policy and "script-src 'self'" in policy
    assert "require-trusted-types-for 'script'" in policy and "trusted-types 'none'" in policy
    for name, text in FILES.items():
        addresses = set(re.findall(r"https?://[\w./-]+|(?<=[\"'(])//\w+\.\w+/", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|eval|Function)\b", text), (
            name
        )
        assert "document.write" not in text and "@import" not in text, name
    assert not re.search(r"\sstyle=|\son\w+=|<script>|<style", response.text)


def test_each_file_is_served_and_each_import_and_link_is_a_file(scripted):
    for path, file in page_files().items():
        response = scripted.client.get(path)
        assert response.content == file.read_bytes()
        assert response.headers["x-content-type-options"] == "nosniff"
    linked = set(re.findall(r'(?:href|src)="(page/[^"]+)"', FILES["index.html"]))
    assert {path for path in linked if f"/{path}" not in page_files()} == set()
    reached = {"scripts/theme.js", "scripts/main.js"}
    for name, text in SCRIPTS.items():
        for target in re.findall(r'from "(\.[^"]+)"', text):
            path = (PAGE / name).parent.joinpath(target).resolve().relative_to(PAGE.resolve())
            assert path.as_posix() in SCRIPTS, f"{name} imports {target}"
            reached.add(path.as_posix())
    assert reached == set(SCRIPTS), "a module that nothing imports"


def test_each_id_that_a_script_names_is_in_the_page():
    made = {"elapsed", "startup", "key"}  # by welcome.js
    there = re.findall(r'\bid="([^"]+)"', FILES["index.html"])
    assert len(there) == len(set(there))
    for name, text in SCRIPTS.items():
        for id in re.findall(r'byId\("([^"]+)"\)', text):
            assert id in there or id in made, f"{name} names #{id}"
    for id in re.findall(r'(?:for|aria-controls)="([^"]+)"', FILES["index.html"]):
        assert id in there


def test_each_file_is_one_idea_in_a_folder_of_a_handful():
    for folder in {path.parent for path in page_files().values()}:
        assert len(list(folder.iterdir())) <= 12, folder
    assert {
        name: len(text.splitlines()) for name, text in FILES.items() if len(text.splitlines()) > 300
    } == {}


def test_no_path_leads_out_of_the_page(scripted):
    for path in ("/page/", "/page/../app.py", "/page/%2e%2e/app.py", "/page/scripts", "/page/x.js"):
        assert scripted.client.get(path).status_code == 404


def test_the_start_shows_what_moves_and_compiles():
    """/stats says so without an engine, from the display that the terminal has."""
    from rich.console import Console

    from jaxattn.cli.startup.progress_display import ProgressDisplay

    engine = ScriptedEngine()
    engine.hold.clear()
    with ProgressDisplay(Console(quiet=True)) as display:
        display.compiles("decode", done=False)
        display.moved("loading", 3, 8)

        def make():
            assert engine.hold.wait(30)
            return engine

        given = served(make)
        object.__setattr__(given, "progress", display.tasks)
        with live(given, wait=False) as server:
            stats = server.client.get("/stats").json()
            assert stats["phase"] == "starting" and stats["startup"]["seconds"] >= 0
            assert stats["startup"]["tasks"] == [
                {"name": "compiling decode", "done": 0, "of": 1, "bytes": False},
                {"name": "loading", "done": 3, "of": 8, "bytes": True},
            ]
            engine.hold.set()
            server.call(server.service.ready())
            stats = server.client.get("/stats").json()
            assert stats["phase"] == "ready" and stats["startup"]["tasks"] == []


def test_stats_say_the_defaults_of_requests():
    with live(served(ScriptedEngine, temperature=0.6, top_k=20)) as server:
        assert server.client.get("/stats").json()["defaults"] == {
            "temperature": 0.6, "top_p": 1, "top_k": 20, "min_p": 0, "repetition_penalty": 1,
        }  # fmt: skip


# --- in a browser


def visit(tab, server, **stored):
    """Opens the page with what the browser is to have stored."""
    tab.call("Page.navigate", url=f"{server.url}/ping")
    tab.until("document.readyState === 'complete' && location.pathname === '/ping'")
    tab.run("localStorage.clear(); sessionStorage.clear()")
    for name, value in stored.items():
        tab.run(f"localStorage.setItem('jaxattn.{name}', {json.dumps(json.dumps(value))})")
    tab.call("Page.navigate", url=server.url)
    tab.until("document.getElementById('phase')?.textContent")


def ready(tab):
    tab.until("document.getElementById('phase').textContent === 'ready'")


def last(selector):
    return f"[...document.querySelectorAll('{selector}')].at(-1)"


def set_field(tab, id, value):
    tab.run(
        f"{{ const field = document.getElementById('{id}'); field.value = {json.dumps(str(value))};"
        " field.dispatchEvent(new Event('input')); }"
    )


def say(tab, text):
    set_field(tab, "prompt", text)
    tab.run("document.getElementById('send').click()")


def answered(tab):
    tab.until("document.querySelector('.assistant') && document.getElementById('stop').hidden")


def stored(tab):
    """The messages of the only conversation that is stored."""
    [name] = tab.run("Object.keys(localStorage).filter((key) => key.startsWith('jaxattn.chat.'))")
    return json.loads(tab.run(f"localStorage.getItem({name!r})"))["messages"]


def stream(tab, *chunks):
    """The next answer is a stream of chunks, as the server would send it; requests are kept."""
    lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    tab.run(
        "{ window.sent ??= []; window.real ??= window.fetch;"
        " window.fetch = async (path, options) => {"
        " if (!path.startsWith('v1/')) return window.real(path, options);"
        " window.sent.push(JSON.parse(options.body));"
        f" return new Response({json.dumps(lines)}, {{ status: 200 }}); }} }}"
    )


def delta(finish=None, **given):
    return {"choices": [{"index": 0, "delta": given, "finish_reason": finish}]}


def usage(tokens, total=0):
    return {"choices": [], "usage": {"completion_tokens": tokens, "total_tokens": total}}


@pytest.fixture(scope="module")
def chatting(tab):
    """A server, and the page of it in the tab."""
    engine = ScriptedEngine(step_seconds=0.005)
    with live(served(lambda: engine)) as server:
        server.engine = engine
        yield server


@needs_chromium
def test_a_chat_in_a_browser(tab, chatting):
    engine = chatting.engine
    evil = "<img src=x onerror=document.title=1><b>"
    visit(tab, chatting)
    ready(tab)
    tab.events.clear()
    assert tab.run("document.title") == "model"
    assert tab.run("document.getElementById('temperature').placeholder") == "0"
    set_field(tab, "max_tokens", 60)
    set_field(tab, "temperature", 0)
    say(tab, evil)
    tab.until(f"{last('.assistant .actions .meta')}?.textContent.startsWith('60 tokens')")
    assert tab.run(f"{last('.bubble')}.textContent") == evil
    assert stored(tab)[1]["content"] == (f"user: {evil}\nassistant: " * 2)[:60]
    assert evil in tab.run(f"{last('.assistant > .markdown')}.textContent")
    assert tab.run("document.querySelectorAll('#messages img, #messages b').length") == 0
    assert engine.added[-1].temperature == 0 and engine.added[-1].max_tokens == 60
    assert tab.run(f"{last('.note')}.textContent") == "Cut at 60 tokensContinue"
    assert chatting.quiet()
    # The second turn has the first one before it.
    say(tab, "again")
    tab.until("document.querySelectorAll('.assistant').length === 2")
    answered(tab)
    assert bytes(engine.added[-1].prompt).decode().startswith(f"user: {evil}\nassistant: user")
    # Plots move, and the plan is there.
    tab.until("document.getElementById('plan').textContent.includes('weights')")
    tab.until("document.getElementById('plots').textContent.includes('0 of 4')")
    tab.until("document.querySelector('.plot .line').getAttribute('d')")
    # Nothing was refused by the policy, and nothing came from elsewhere.
    assert not [each for each in tab.events if "Content Security" in str(each)]
    asked = [event for event in tab.events if event["method"] == "Network.requestWillBeSent"]
    assert {event["params"]["request"]["url"].split("/")[2] for event in asked} == {
        f"127.0.0.1:{chatting.port}"
    }
    # A reload shows what the browser stored.
    tab.run("window.old = true; location.reload()")
    tab.until("!window.old && document.querySelectorAll('.bubble').length === 2")
    assert tab.until("document.querySelector('#conversations .title')?.textContent") == evil


@needs_chromium
def test_markdown_is_shown_as_nodes_while_it_grows(tab, chatting):
    visit(tab, chatting)
    ready(tab)
    text = (
        "# Title\n\nA **bold** `word` and [a link](https://example.org), "
        "[none](javascript:alert(1)).\n\n"
        "```python\ndef f():  # <b>\n```\n\n| a | b |\n|---|--:|\n| 1 | <i>2</i> |\n\n- x\n  - y\n"
    )
    stream(tab, *(delta(content=each) for each in text), delta("stop"), usage(9))
    say(tab, "go")
    answered(tab)
    found = tab.run("document.querySelector('.assistant > .markdown').innerHTML")
    assert '<h3 class="level-1">Title</h3>' in found and "<strong>bold</strong>" in found
    assert (
        '<a href="https://example.org" target="_blank" rel="noopener noreferrer nofollow">' in found
    )
    assert "<span>none</span>" in found and "javascript:" not in found
    assert '<span class="code-keyword">def</span>' in found and "&lt;b&gt;" in found
    assert '<td class="align-right">&lt;i&gt;2&lt;/i&gt;</td>' in found
    assert re.search(r"<li>x<ul><li>y</li></ul></li>", found)
    assert (
        tab.run("document.querySelector('figure.code button').getAttribute('aria-label')")
        == "Copy code"
    )


@needs_chromium
def test_thoughts_are_folded_and_calls_get_results(tab, chatting):
    visit(tab, chatting)
    ready(tab)
    tab.run("document.getElementById('example-tools').click()")
    call = {"index": 0, "id": "c1", "function": {"name": "get_weather", "arguments": '{"city":'}}
    rest = {"index": 0, "function": {"arguments": ' "Oslo"}'}}
    stream(
        tab, delta(role="assistant", content=""), delta(reasoning_content="It asks "),
        delta(reasoning="for weather."), delta(tool_calls=[call]), delta(tool_calls=[rest]),
        delta("tool_calls"), usage(20),
    )  # fmt: skip
    say(tab, "weather?")
    answered(tab)
    assert tab.run("document.querySelector('.thoughts').open") is False
    assert tab.run("document.querySelector('.thoughts summary').textContent").startswith(
        "Thought for "
    )
    tab.run("document.querySelector('.thoughts').open = true")
    tab.until(
        "document.querySelector('.thoughts .markdown').textContent === 'It asks for weather.'"
    )
    summary = tab.run("document.querySelector('.tool-call summary').textContent")
    assert summary == 'Called get_weather "city": "Oslo"'
    assert '"city": "Oslo"' in tab.run("document.querySelector('.tool-call pre').textContent")
    stream(tab, delta(content="Snow."), delta("stop"), usage(3))
    tab.run("document.querySelector('.tool-result textarea').value = 'snow'")
    tab.run("document.querySelector('.tool-result').requestSubmit()")
    tab.until("document.querySelectorAll('.assistant').length === 2")
    answered(tab)
    sent = tab.run("window.sent.at(-1)")
    assert sent["tools"][0]["function"]["name"] == "get_weather"
    assert sent["messages"][1:] == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "It asks for weather.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
                }
            ],
        },
        {"role": "tool", "content": "snow", "tool_call_id": "c1", "name": "get_weather"},
    ]
    assert tab.run("document.querySelectorAll('.tool-result').length") == 0


@needs_chromium
def test_a_cut_answer_goes_on_where_it_ended(tab, chatting):
    visit(tab, chatting)
    ready(tab)
    stream(tab, delta(content="One, "), delta("length"), usage(256))
    say(tab, "count")
    answered(tab)
    assert tab.run("document.querySelector('.note').textContent") == "Cut at 256 tokensContinue"
    stream(tab, delta(content="two."), delta("stop"), usage(4))
    tab.run("document.querySelector('.resume').click()")
    tab.until("document.querySelector('.assistant > .markdown').textContent === 'One, two.'")
    answered(tab)
    sent = tab.run("window.sent.at(-1)")
    assert sent["continue_final_message"] is True and sent["add_generation_prompt"] is False
    assert sent["messages"][-1] == {"role": "assistant", "content": "One, "}
    assert tab.run("document.querySelectorAll('.note').length") == 0
    assert tab.run(f"{last('.actions .meta')}.textContent").startswith("260 tokens")
    # Edited, the question is asked anew without the old answer.
    stream(tab, delta(content="Three."), delta("stop"), usage(2))
    tab.run("document.querySelector('.user [aria-label=\"Edit message\"]').click()")
    tab.run("document.querySelector('.editor').value = 'and?'")
    tab.run("document.querySelector('.edit').requestSubmit()")
    answered(tab)
    assert [each["content"] for each in tab.run("window.sent.at(-1).messages")] == ["and?"]
    stream(tab, delta(content="Four."), delta("stop"), usage(2))
    tab.run("document.querySelector('[aria-label=\"Regenerate answer\"]').click()")
    answered(tab)
    assert [each["content"] for each in stored(tab)] == ["and?", "Four."]


@needs_chromium
def test_the_stop_button_frees_the_row(tab):
    engine = ScriptedEngine(step_seconds=0.02)
    with live(served(lambda: engine)) as server:
        visit(tab, server)
        ready(tab)
        set_field(tab, "max_tokens", 200)
        say(tab, "hi")
        tab.until(
            "(document.querySelector('.assistant > .markdown')?.textContent ?? '').length > 3"
        )
        assert tab.run("document.getElementById('stop').hidden") is False
        tab.run("document.getElementById('stop').click()")
        tab.until("document.querySelector('.note')?.textContent.startsWith('Stopped')")
        assert server.quiet() and 3 < len(stored(tab)[1]["content"]) < 200
        assert not engine.busy


@needs_chromium
def test_an_error_is_said_and_retried(tab):
    engine = ScriptedEngine()
    with live(served(lambda: engine), keys=("sesame",)) as server:
        visit(tab, server)
        tab.until("document.getElementById('phase').textContent === 'API key required'")
        tab.run("document.getElementById('key').value = 'sesame'")
        tab.run("document.querySelector('form.key').requestSubmit()")
        ready(tab)
        engine.failures = 1
        set_field(tab, "max_tokens", 12)
        say(tab, "hi")
        said = tab.until("document.querySelector('.error .message-text')?.textContent")
        assert said == "the engine failed; the answer is incomplete"
        tab.run("document.querySelector('.retry').click()")
        tab.until(
            "document.querySelector('.assistant > .markdown').textContent.startsWith('user: hi')"
        )
        answered(tab)
        assert tab.run("document.querySelectorAll('.error').length") == 0
        # A field out of range is named, and nothing is sent.
        count = len(engine.added)
        set_field(tab, "top_p", 2)
        say(tab, "more")
        assert tab.until("document.getElementById('notice').textContent").startswith("Top p: ")
        assert tab.run("document.activeElement.id") == "top_p" and len(engine.added) == count


@needs_chromium
def test_a_narrow_screen_shows_the_panels_as_drawers(tab, chatting):
    size = {"height": 844, "deviceScaleFactor": 1, "mobile": True}
    tab.call("Emulation.setDeviceMetricsOverride", width=390, **size)
    try:
        visit(tab, chatting)
        ready(tab)
        assert tab.run("document.getElementById('panel').hidden") is True
        tab.run("document.getElementById('toggle-panel').click()")
        assert tab.run("document.getElementById('chat').inert") is True
        tab.run(
            "document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', bubbles: true}))"
        )
        assert tab.run("document.getElementById('panel').hidden") is True
        call = {"id": "c", "function": {"name": "f" * 80, "arguments": f'["{"z" * 400}"]'}}
        table = f"| a | b |\n|---|---|\n| {'x' * 400} | 1 |\n\n`{'y' * 400}`"
        stream(tab, delta(content=table), delta("tool_calls", tool_calls=[call]))
        say(tab, "wide")
        answered(tab)
        assert tab.run("document.documentElement.scrollWidth") == 390
        assert tab.run("document.getElementById('scroll').scrollWidth") == 390
    finally:
        tab.call("Emulation.clearDeviceMetricsOverride")
