"""The page at /: it chats, streams, stops and shows gauges; nothing of a text becomes markup."""

import re

import pytest

from jaxattn.server.app import PAGE
from tests.helpers import browser
from tests.helpers.live_server import live, served
from tests.helpers.scripted_engine import ScriptedEngine

needs_chromium = pytest.mark.skipif(
    browser.installed() is None, reason="needs a headless Chromium, such as Debian's chromium"
)


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser.page(browser.installed(), tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def test_the_page_needs_nothing_from_elsewhere(scripted):
    response = scripted.client.get("/")
    assert response.headers["content-security-policy"].startswith("default-src 'self';")
    for path in PAGE.iterdir():
        text = path.read_text()
        assert not re.search(r"https?://|//\w+\.\w+/", text)
        assert "innerHTML" not in text and "document.write" not in text
    assert "style=" not in response.text and "onclick" not in response.text


def last(kind):
    return f"[...document.querySelectorAll('.{kind}')].at(-1)?.textContent"


def say(tab, text):
    tab.run(f"document.getElementById('prompt').value = {text!r}")
    tab.run("document.getElementById('send').click()")


@needs_chromium
def test_a_chat_in_a_browser(tab):
    engine = ScriptedEngine(step_seconds=0.005)
    evil = "<img src=x onerror=document.title=1><b>"
    with live(served(lambda: engine)) as server:
        tab.call("Page.navigate", url=server.url)
        tab.until("document.getElementById('phase')?.textContent === 'ready'")
        assert tab.run("document.title") == "model"
        tab.run("document.getElementById('max_tokens').value = 60")
        tab.run("document.getElementById('temperature').value = 0")
        say(tab, evil)
        tab.until("document.getElementById('said').textContent.startsWith('60 tokens')")
        assert tab.run(last("user")) == evil
        assert tab.run(last("assistant")) == (f"user: {evil}\nassistant: " * 2)[:60]
        assert tab.run("document.querySelectorAll('#messages img, #messages b').length") == 0
        assert engine.added[-1].temperature == 0 and engine.added[-1].max_tokens == 60
        assert server.quiet()
        # The second turn has the first one before it.
        say(tab, "again")
        tab.until("document.querySelectorAll('.assistant').length === 2")
        tab.until("document.getElementById('send').disabled === false")
        assert bytes(engine.added[-1].prompt).decode().startswith(f"user: {evil}\nassistant: user")
        # Gauges move, and the plan is there.
        tab.until("document.getElementById('plan').textContent.includes('weights')")
        tab.until("document.getElementById('rows-said').value === '0 of 4'")
        refused = [
            event
            for event in tab.events
            if event["method"] == "Log.entryAdded" and "Content Security" in str(event)
        ]
        assert not refused
        asked = [event for event in tab.events if event["method"] == "Network.requestWillBeSent"]
        assert {event["params"]["request"]["url"].split("/")[2] for event in asked} == {
            f"127.0.0.1:{server.port}"
        }


@needs_chromium
def test_the_stop_button_frees_the_row(tab):
    engine = ScriptedEngine(step_seconds=0.02)
    with live(served(lambda: engine)) as server:
        tab.call("Page.navigate", url=server.url)
        tab.until("document.getElementById('phase')?.textContent === 'ready'")
        tab.run("document.getElementById('max_tokens').value = 200")
        say(tab, "hi")
        tab.until(f"({last('assistant')} || '').length > 3")
        assert tab.run("document.getElementById('stop').disabled") is False
        tab.run("document.getElementById('stop').click()")
        tab.until("document.getElementById('said').textContent === 'stopped'")
        assert server.quiet() and len(tab.run(last("assistant"))) < 200
        assert not engine.busy


@needs_chromium
def test_an_error_is_said(tab):
    engine = ScriptedEngine()
    with live(served(lambda: engine), keys=("sesame",)) as server:
        tab.call("Page.navigate", url=server.url)
        tab.until("document.getElementById('phase')?.textContent === 'a key is needed'")
        tab.run("document.getElementById('key').value = 'sesame'")
        tab.until("document.getElementById('phase').textContent === 'ready'")
        engine.failures = 1
        say(tab, "hi")
        assert tab.until(last("error")) == "the engine failed; the answer is cut"
