"""Coding agents and agent libraries, as users install them: they finish a small edit here."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.helpers import agent_libraries
from tests.helpers.live_server import live, served
from tests.helpers.scripted_engine import LIMITS, ScriptedEngine
from tests.helpers.tool_calls import call

# Of the npm registry and of PyPI, with the versions that these tests were written with.
NODE = (
    *("@openai/codex@0.171.0", "@anthropic-ai/claude-code@2.1.332", "openai@6.49.0"),
    *("ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/anthropic@3.0.140"),
)
PYTHON = (
    *("openai-agents==0.24.0", "pydantic-ai-slim[openai,anthropic]==2.68.0", "litellm==1.110.2"),
    *("langchain-openai==1.7.4", "langchain-anthropic==1.7.10"),
)
CLIENTS = "JAXATTN_TEST_CLIENTS"  # a folder that keeps what was installed for the next run
LONG = dataclasses.replace(LIMITS, max_model_len=2**17)

pytestmark = pytest.mark.slow(
    reason="a client that reads a stream in another way than its library; found by the streams of "
    "openai-python and anthropic too"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(os.environ.get(CLIENTS) or tmp_path_factory.mktemp("clients"))


def installed(command, log):
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    if done.returncode:
        pytest.skip(f"{log} cannot be installed here: {done.stderr[-300:]}")


@pytest.fixture(scope="module")
def node(folder):
    """Where Node's packages are."""
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    modules = folder / "node_modules"
    if not modules.exists():
        installed(["npm", "install", "--prefix", str(folder), "--no-fund", *NODE], "npm packages")
    return modules


@pytest.fixture(scope="module")
def python(folder):
    """An interpreter that has the agent libraries."""
    made = folder / "venv" / "bin" / "python"
    if not made.exists():
        installed([sys.executable, "-m", "venv", str(folder / "venv")], "a virtual environment")
        installed([str(made), "-m", "pip", "install", "-q", *PYTHON], "agent libraries")
    return made


@pytest.fixture
def repository(tmp_path):
    """A folder under git with a wrong function."""
    made = tmp_path / "repository"
    made.mkdir()
    (made / "add.py").write_text("def add(a, b):\n    return a - b\n")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "begin"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        subprocess.run(["git", *identity, *arguments], cwd=made, check=True)
    return made


def json_in(form):
    """What writes a call in a format whose arguments are JSON."""
    return lambda name, arguments: call(form, json.dumps(arguments), name)


def coder(name, arguments):
    pairs = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def glm(name, arguments):
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def turns(write, steps):
    """A model that answers each turn with the next step, a call or a text.

    It says the step that as many results of tools ask for as the prompt has.
    """
    prompts: list[str] = []

    def script(request):
        prompt = bytes(request.prompt).decode()
        prompts.append(prompt)
        step = steps[min(prompt.count("\ntool: "), len(steps) - 1)]
        return (step if isinstance(step, str) else write(*step)).encode()

    return script, prompts


def run(command, where, **variables):
    done = subprocess.run(
        [str(each) for each in command],
        cwd=where,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


# Names of `--tool-parser`.
FORMATS = {"qwen3_coder": coder, "glm": glm} | {
    form: json_in(form) for form in ("hermes", "deepseek_v31", "kimi_k2", "mistral")
}


@pytest.mark.parametrize("form", FORMATS)
def test_codex_finishes_an_edit(node, repository, tmp_path, form):
    command = "sed -i 's/a - b/a + b/' add.py && cat add.py"
    script, prompts = turns(
        FORMATS[form], [("exec_command", {"cmd": command}), "I mended the function."]
    )
    home = tmp_path / "home"
    home.mkdir()
    model = served(lambda: ScriptedEngine(script, limits=LONG), limits=LONG)
    with live(model, tool_parser=form) as server:
        (home / "config.toml").write_text(
            textwrap.dedent(f"""\
            model = "model"
            model_provider = "jaxattn"
            [model_providers.jaxattn]
            name = "jaxattn"
            base_url = "{server.url}/v1"
            wire_api = "responses"
            """)
        )
        said = run(
            [node / ".bin" / "codex", "exec", "-s", "danger-full-access", "Mend add.py"],
            repository,
            CODEX_HOME=str(home),
            HOME=str(home),
        )
    assert "I mended the function." in said
    assert (repository / "add.py").read_text() == "def add(a, b):\n    return a + b\n"
    assert "return a + b" in prompts[-1].rpartition("\ntool: ")[2]


@pytest.mark.parametrize("form", FORMATS)
def test_claude_code_finishes_an_edit(node, repository, tmp_path, form):
    file = str(repository / "add.py")
    edit = {"file_path": file, "old_string": "a - b", "new_string": "a + b"}
    script, prompts = turns(
        FORMATS[form], [("Read", {"file_path": file}), ("Edit", edit), "I mended the function."]
    )
    (tmp_path / "home").mkdir()
    [claude] = [*node.glob("@anthropic-ai/claude-code-*/claude")] or pytest.skip("no binary")
    model = served(lambda: ScriptedEngine(script, limits=LONG), limits=LONG)
    with live(model, tool_parser=form) as server:
        said = run(
            [claude, "-p", "Mend add.py", "--allowedTools", "Edit,Read"],
            repository,
            HOME=str(tmp_path / "home"),
            ANTHROPIC_BASE_URL=server.url,
            ANTHROPIC_AUTH_TOKEN="none",
            ANTHROPIC_MODEL="model",
            ANTHROPIC_DEFAULT_HAIKU_MODEL="model",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
    assert "I mended the function." in said
    assert (repository / "add.py").read_text() == "def add(a, b):\n    return a + b\n"
    assert "return a - b" in prompts[-1] and prompts[-1].count("\ntool: ") == 2


LIBRARIES = (
    *("openai_agents", "pydantic_ai_responses", "pydantic_ai_messages", "litellm_responses"),
    *("litellm_messages", "langchain_responses", "langchain_messages"),
)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_of_agents_calls_a_tool_and_reads_the_answer(python, tmp_path, library):
    script, prompts = turns(FORMATS["hermes"], [("weather", {"city": "Ulm"}), "It is sunny."])
    with live(served(lambda: ScriptedEngine(script, limits=LONG), limits=LONG)) as server:
        said = run([python, agent_libraries.__file__, library, server.url], tmp_path)
    assert said.strip().endswith("It is sunny.")
    assert "sun in Ulm" in prompts[-1].rpartition("\ntool: ")[2]


@pytest.mark.parametrize("library", ("openai_node", "ai_sdk_responses", "ai_sdk_messages"))
def test_a_library_of_node_calls_a_tool_and_reads_the_answer(node, tmp_path, library):
    script, prompts = turns(FORMATS["hermes"], [("weather", {"city": "Ulm"}), "It is sunny."])
    client = node.parent / "agent_libraries.mjs"  # where Node finds the packages
    shutil.copy(Path(agent_libraries.__file__).with_suffix(".mjs"), client)
    with live(served(lambda: ScriptedEngine(script, limits=LONG), limits=LONG)) as server:
        said = run(["node", client, library, server.url], tmp_path)
    assert said.strip().endswith("It is sunny.")
    assert "sun in Ulm" in prompts[-1].rpartition("\ntool: ")[2]
