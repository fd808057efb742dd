"""The import graph: rooms import downwards only, and no files import each other in a circle."""

import functools
from pathlib import Path

import pytest

from scripts import import_graph
from scripts.import_graph import circle, wrong_arrows


@functools.cache
def graph():
    return import_graph.import_graph()


def test_every_file_lies_in_a_room():
    for module in graph():
        import_graph.room_of(module)
    with pytest.raises(ValueError, match="no room"):
        import_graph.room_of("attic.box")


def test_no_arrow_runs_back_up():
    assert wrong_arrows(graph()) == []


def test_no_files_import_each_other_in_a_circle():
    assert circle(graph()) == []


@pytest.mark.parametrize(
    "module, target",
    [
        ("core.checks", "ops.mla.decode"),
        ("ops.mla.decode", "models.hybrid"),
        ("ops.gdn.decode", "ops.mla.decode"),
        ("arena", "core.checks"),
        ("text.hub", "models.base"),
        ("text.hub", "core.checks"),
        ("kernels.mla_append", "ops.mla.append"),
        ("engine.engine", "models.hybrid"),
    ],
)
def test_a_wrong_arrow_is_found(module, target):
    [found] = wrong_arrows({**{name: {} for name in graph()}, module: {target: 7}})
    assert found.startswith(f"{module}:7 imports ") and target in found


def test_a_circle_is_found():
    ring = circle({"a": {"b": 1}, "b": {"c": 1}, "c": {"b": 1}})
    assert ring == ["b", "c", "b"]


def test_imports_inside_functions_and_of_submodules_count(tmp_path: Path):
    package = tmp_path / "jaxattn"
    (package / "core").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "core" / "__init__.py").touch()
    (package / "core" / "array_checks.py").write_text("def f():\n    from jaxattn.ops import mla\n")
    (package / "ops").mkdir()
    (package / "ops" / "__init__.py").touch()
    (package / "ops" / "mla.py").write_text("import jaxattn.core.validation.array_checks\n")
    graph = import_graph.import_graph(tmp_path)
    assert graph["core.checks"] == {"ops.mla": 2}
    assert graph["ops.mla"] == {"core.checks": 1}
