"""A hostile template ends as an error, in time and in its own memory; the next chat works."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxattn.text import TextError
from jaxattn.text.renderer_process import FILE, RendererProcess
from jaxattn.text.template_renderer import packed, receive, send
from tests.helpers.kernel_cases import slow

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
ECHO = "{{ messages[0].content }}"


@pytest.fixture(scope="module")
def renderer():
    made = RendererProcess(seconds=60, max_characters=2**20, max_bytes=2**29)
    yield made
    made.close()


@pytest.fixture(scope="module")
def hasty():
    made = RendererProcess(seconds=0.7)
    yield made
    made.close()


def render(renderer, source, **variables):
    return renderer.render(source, HELLO | variables, "model/chat_template.jinja")


ENDLESS = {
    "nested loops": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "a call of C": "{{ 7 ** (n ** 8) }}",
    "a filter": "{{ lipsum(n=n ** 7) }}",
    "macros": "{% macro m(k) %}{% if k %}{{ m(k - 1) }}{{ m(k - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "while compiling": "{{ 'a'|center(10 ** 8)|wordwrap(1) }}",
}
HUGE = {
    "a product": ("{{ 'a' * n }}", "died; its memory limit is 512 MiB"),
    "a format": ("{{ '%99999999999d' % n }}", "died; its memory limit is 512 MiB"),
    "output": ("{% for i in range(99999) %}{{ 'a' * 99 }}{% endfor %}", "more than 1,048,576 char"),
    "a long range": ("{% for i in range(n) %}{% endfor %}", "raised OverflowError: Range too big"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "raised RecursionError"),
    "nesting": ("{{" + "(" * 9999 + "1" + ")" * 9999 + "}}", "raised RecursionError"),
}
FORBIDDEN = {
    "classes": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ cycler.__init__.__globals__.os.environ }}",
    "changes": "{{ messages.append(1) }}",
    "formats": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "files": "{% include '/etc/hostname' %}",
}


@pytest.mark.slow_cases(
    reason="a template that its process does not end; text/test_process.py finds it with loops, "
    "with a call of C and with a template that compiles for long, too"
)
@pytest.mark.parametrize(
    "name", [slow(name) if name in ("a filter", "macros") else name for name in ENDLESS]
)
def test_a_template_without_end_is_stopped(name, hasty):
    start = time.monotonic()
    with pytest.raises(TextError, match="chat_template.jinja did not finish within 0.7 s"):
        render(hasty, ENDLESS[name], n=10)
    assert time.monotonic() - start < 10
    assert render(hasty, ECHO) == "hello"


@pytest.mark.parametrize("name", HUGE)
def test_a_template_that_wants_too_much_is_stopped(name, renderer):
    source, words = HUGE[name]
    with pytest.raises(TextError, match="chat_template.jinja ") as caught:
        render(renderer, source, n=10**11)
    assert words in str(caught.value)
    assert render(renderer, ECHO) == "hello"


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_template_stays_in_its_sandbox(name, renderer):
    with pytest.raises(TextError, match=r"chat_template.jinja raised \w+Error"):
        render(renderer, FORBIDDEN[name])


def test_a_damaged_template_is_named_with_its_line(renderer):
    with pytest.raises(TextError, match="has an error on line 3: Encountered unknown tag 'fo'"):
        render(renderer, "a\n\n{% fo %}")


def test_a_refusal_of_the_template_is_told_apart(renderer):
    with pytest.raises(TextError, match="chat_template.jinja rejected the messages: no tools here"):
        render(renderer, "{{ raise_exception('no tools here') }}")


def test_values_that_are_no_json_are_refused(renderer):
    for value in ({1, 2}, object(), b"a"):
        with pytest.raises(TextError, match="a chat must consist of JSON values: Object of type"):
            render(renderer, ECHO, value=value)
    assert render(renderer, ECHO) == "hello"


def test_one_process_serves_all_chats_and_many_threads(renderer):
    assert render(renderer, ECHO) == "hello"
    process = renderer._process
    texts: list[str] = []

    def work(number):
        texts.append(render(renderer, ECHO + "{{ number }}", number=number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == sorted(f"hello{number}" for number in range(20))
    assert renderer._process is process and process.poll() is None


def test_halves_of_surrogate_pairs_and_large_texts_come_back_whole(renderer):
    for text in ("\ud800", "中" * 200_000, "\0\r\n\u2028"):
        found = renderer.render(ECHO, {"messages": [{"role": "user", "content": text}]}, "t")
        assert found == text


def test_a_killed_process_is_started_again(renderer):
    assert render(renderer, ECHO) == "hello"
    renderer._process.kill()
    renderer._process.wait()
    assert render(renderer, ECHO) == "hello"


def test_ctrl_c_does_not_leave_an_answer_for_the_next_chat(renderer):
    assert render(renderer, ECHO) == "hello"
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        render(renderer, ENDLESS["nested loops"])
    timer.join()
    assert render(renderer, ECHO) == "hello"


def test_no_process_outlives_its_renderer():
    mine = RendererProcess()
    assert render(mine, ECHO) == "hello"
    process = mine._process
    del mine
    gc.collect()
    assert process.returncode is not None


@pytest.fixture
def alone():
    """The process of templates, which nobody watches."""
    command = [sys.executable, "-P", str(FILE), str(2**29), "0.5"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert receive(process.stdout) == "ready"
        yield process
        process.kill()


def test_a_process_whose_parent_is_gone_ends_itself(alone):
    alone.stdin.close()
    assert alone.wait(timeout=20) == 0


def test_it_does_so_in_the_middle_of_a_template_without_end(alone):
    source = ENDLESS["nested loops"]
    send(alone.stdin, packed({"source": source, "variables": HELLO, "most": 9}))
    assert alone.wait(timeout=20) == -signal.SIGALRM


def test_a_process_that_cannot_start_says_so(monkeypatch):
    monkeypatch.setattr(sys, "executable", os.devnull)
    with pytest.raises(TextError, match="the process for chat templates cannot be started"):
        render(RendererProcess(), ECHO)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(TextError, match="exited at its start with code 1"):
        render(RendererProcess(), ECHO)
