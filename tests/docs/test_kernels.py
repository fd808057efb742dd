"""The table of docs/kernels.md is the code's, and each kernel's header leads on."""

import ast
import re
from pathlib import Path

import pytest

import jaxattn
from tests.helpers import every_kernel

ROOT = Path(__file__).parents[2]
PACKAGE = Path(jaxattn.__file__).parent
PAGE = (ROOT / "docs" / "kernels.md").read_text()
KERNELS = PACKAGE / "kernels"
# Rooms of several kernels.
SHARED = {"attention", "hopper"}
# Kernels with a header of their own that another kernel's op calls.
PARTS = {
    "gdn_decode/recent.py",
    "mla/decode/swap_ab/launch.py",
    "moe/backward/activation_gradient.py",
    "moe/backward/launch.py",
    "moe/backward/weight_gradient.py",
    "moe/combine.py",
    "moe/grouped_gemm.py",
    "turboquant/cache/dequantization.py",
    "turboquant/cache/key_mean.py",
}


def rows() -> list[tuple[list[str], str, str, str]]:
    """(ops, kernel, reference, tests) of each row, as the table has them."""
    table = PAGE.partition("| op | kernel")[2].partition("\n\n")[0]
    cells = [[re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:-1]]
             for line in table.splitlines()[2:]]  # fmt: skip
    return [(ops, kernel, reference, tests) for ops, [kernel], [reference], [tests] in cells]


def header(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


ROWS = rows()


def test_the_table_has_each_op_with_a_kernel_once():
    named = [op for ops, *_ in ROWS for op in ops]
    assert len(named) == len(set(named)) and set(every_kernel.OPS) <= set(named)


def test_each_op_of_the_table_is_defined_beside_its_reference():
    for ops, _, reference, _ in ROWS:
        folder = PACKAGE / "ops" / reference
        files = folder.parent.glob("*.py") if "/" in reference else [folder]
        defined = "".join(path.read_text() for path in files)
        for op in ops:
            assert f"def {op}(" in defined, f"{op} is not in {reference} or beside it"


def test_no_kernel_is_missing_from_the_table():
    named = {kernel for _, kernel, _, _ in ROWS}
    headers = {str(path.relative_to(KERNELS)): header(path) for path in KERNELS.rglob("*.py")}
    assert {
        name for name, text in headers.items() if "Limits:" in text and "Reference" in text
    } - PARTS == named
    rooms = {name.partition("/")[0] for name in headers if "/" in name}
    with_kernels = {name.partition("/")[0] for name in named | (PARTS & headers.keys())}
    assert rooms - SHARED == with_kernels - SHARED


@pytest.mark.parametrize("kernel, reference, tests", [row[1:] for row in ROWS])
def test_a_row_leads_to_files_and_the_header_to_limits_reference_and_tests(
    kernel, reference, tests
):
    assert (PACKAGE / "ops" / reference).is_file() and (ROOT / tests).is_file()
    text = header(KERNELS / kernel)
    assert "Limits:" in text and "Reference" in text
    assert tests in text.split() or tests in re.findall(r"[\w/]+\.py", text)
