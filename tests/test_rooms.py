"""The structure of the package: which room imports which, how large rooms are, and their names."""

import collections
import functools
import re
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
        ("core.validation.array_checks", "ops.mla.decode"),
        ("ops.mla.decode", "models.embedded.hybrid_model"),
        ("ops.gdn.decode", "ops.mla.decode"),
        ("arena", "core.validation.array_checks"),
        ("text.hub_tokenizer", "models.interface"),
        ("core.validation.array_checks", "text.hub_tokenizer"),
        ("kernels.mla.append", "ops.mla.append"),
        ("kernels.attention.split_kv_schedule", "kernels.mla.append"),
        ("engine.sampling.sampler", "engine.scheduling.scheduler"),
        ("engine.engine", "models.embedded.hybrid_model"),
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
    (package / "core" / "checks.py").write_text("def f():\n    from jaxattn.ops import mla\n")
    (package / "ops").mkdir()
    (package / "ops" / "__init__.py").touch()
    (package / "ops" / "mla.py").write_text("import jaxattn.core.checks\n")
    graph = import_graph.import_graph(tmp_path)
    assert graph["core.checks"] == {"ops.mla": 2}
    assert graph["ops.mla"] == {"core.checks": 1}


PACKAGE = import_graph.ROOT / "jaxattn"
MOST_ENTRIES = 12
# Words that say nothing of what a module or a class provides until it is opened: participles,
# prepositions, numbers, pronouns, and names of whatever has no other.
VAGUE = {
    "apart", "beside", "best", "body", "common", "cut", "few", "fine", "fitting", "helpers",
    "kept", "kinds", "looped", "lowered", "meeting", "met", "misc", "narrow", "opening", "own",
    "part", "parts", "piece", "place", "places", "prepare", "several", "stuff", "things", "told",
    "turned", "utils", "whole", "written",
}  # fmt: skip


def folders():
    """The package's folders below its root, which holds one file per public face and command."""
    return [path.parent for path in sorted(PACKAGE.rglob("__init__.py")) if path.parent != PACKAGE]


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: str(folder.relative_to(PACKAGE)))
def test_a_room_opens_into_a_handful(folder):
    entries = [
        path.name
        for path in folder.iterdir()
        if (path.suffix == ".py" and path.stem not in ("__init__", "__main__"))
        or (path / "__init__.py").is_file()
    ]
    assert len(entries) <= MOST_ENTRIES, sorted(entries)


@functools.cache
def classes():
    """(name, file) of each class at the top of a module."""
    return [
        (name, str(path.relative_to(PACKAGE)))
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)
    ]


def test_a_class_name_is_unique_in_the_package():
    found = collections.defaultdict(list)
    for name, file in classes():
        found[name].append(file)
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_modules_and_classes_are_named_for_what_they_provide():
    modules = [path for path in PACKAGE.rglob("*.py") if path.stem in VAGUE]
    assert modules == [] and [each for each in classes() if each[0].lower() in VAGUE] == []
    verbs = ("align", "compare", "fill", "fit", "load", "measure", "open", "quantize", "send")
    named = [path for path in PACKAGE.rglob("*.py") if path.stem.split("_")[0] in verbs]
    assert [str(path.relative_to(PACKAGE)) for path in named] == ["bench/load/load_test.py"]
