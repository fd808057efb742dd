"""The README's examples run as they are printed, without a warning."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def test_one_example_uses_a_kernel_and_one_a_module():
    assert any("mla_decode(" in text or "mla_decode," in text for text in EXAMPLES)
    assert any("MultiHeadLatentAttention" in text for text in EXAMPLES)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_it_runs(number, capsys):
    code = compile(EXAMPLES[number], f"README.md, example {number + 1}", "exec")
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out
