"""The README's examples run as they are printed, without a warning, and its commands are CI's."""

import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.lazy_steps

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_one_example_uses_a_kernel_one_a_module_and_one_the_engine():
    assert any("mla_decode(" in text or "mla_decode," in text for text in EXAMPLES)
    assert any("MultiHeadLatentAttention" in text for text in EXAMPLES)
    assert any("engine.generate(" in text for text in EXAMPLES)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_it_runs(number, capsys):
    code = compile(EXAMPLES[number], f"README.md, example {number + 1}", "exec")
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 150


def test_its_two_commands_are_where_ci_finds_them():
    """.ci/run takes the first block after the mark; a newcomer runs the first block of all."""
    first, *_ = re.findall(r"^```\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    # Its first part names Python where it is too old: pip 23 blames jax.
    check, installed, rest = first.partition(" &&\n    ")
    assert installed and rest == "python3 -m pip install . && python3 -m jaxattn.serve\n"
    code = check.removeprefix("python3 -c '").removesuffix("'")
    exec(code, {})
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(SystemExit, match="needs Python 3.12"),
    ):
        patch.setattr(sys, "version_info", (3, 11, 7))
        exec(code, {})
    marked = TEXT.partition("<!-- tests -->\n")[2]
    assert marked.startswith("```\npython3 -m pip install '.[test]' && python3 -m pytest ")


def test_its_picture_and_its_tables_are_there():
    [picture] = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", TEXT)
    assert (ROOT / picture).stat().st_size > 1000
    assert re.findall(r"<!-- table: (\w+) -->", TEXT) == ["claims", "vllm"]
