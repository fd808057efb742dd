"""What holds of the source of kernels and of their callers: the rules of docs/kernels.md."""

import ast
import collections
import functools
from collections.abc import Iterator
from pathlib import Path

import jaxattn

ROOT = Path(jaxattn.__file__).parent
KERNELS, OPS = ROOT / "kernels", ROOT / "ops"
HOPPER = KERNELS / "hopper"
MOST_LINES = 150
MOST_OPTIONS = 12
INTERNALS = ("jaxlib.", "jax._src.", "jax.experimental.mosaic.")


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text(path))))


@functools.cache
def text(path: Path) -> str:
    return path.read_text()


def files(room: Path = KERNELS, words: tuple[str, ...] = ("",)) -> Iterator[Path]:
    """The files with one of the words; the others need not be parsed."""
    for path in sorted(room.rglob("*.py")):
        if any(word in text(path) for word in words):
            yield path


def test_no_function_is_longer_than_a_reader_keeps_in_mind():
    long = [
        f"{path.relative_to(ROOT)}: {node.name}, {lines} lines"
        for path in files()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MOST_LINES
    ]
    assert not long, f"at most {MOST_LINES} lines: a class with named phases"


def test_every_kernel_is_started_by_launch():
    starts = {
        str(path.relative_to(KERNELS))
        for path in files()
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) == ("plgpu", "kernel")
    }
    assert starts == {"hopper/build/launch.py"}


def test_what_jax_promises_nothing_about_is_imported_in_one_room():
    def imported(node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [each.name for each in node.names]
        if isinstance(node, ast.ImportFrom):
            return [f"{node.module}.{each.name}" for each in node.names]
        return []

    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files(ROOT, ("jaxlib", "_src", "mosaic"))
        if path.parent != HOPPER
        for node in nodes(path)
        for name in imported(node)
        if f"{name}.".startswith(INTERNALS)
    }
    assert not found, "import it from jaxattn.kernels.hopper.mlir"


def test_an_implementation_refuses_by_refusal_alone():
    """`dispatch` takes no other NotImplementedError for a refusal: JAX raises some of its own."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for room in (KERNELS, OPS)
        for path in files(room, ("NotImplementedError",))
        for node in nodes(path)
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
        and node.exc.func.id == "NotImplementedError"
    ]
    assert not found, "raise jaxattn.core.dispatch.Refusal"


def test_nobody_takes_an_error_of_jax_for_a_refusal():
    """Whoever asks whether a kernel serves catches `Refusal`, in every room.

    `compilation/executable_cache.py` and `compilation/step_export.py` ask JAX whether it can write
    a step down.
    """
    asking = [
        ROOT / "engine" / "compilation" / name for name in ("executable_cache.py", "step_export.py")
    ]
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files(ROOT, ("NotImplementedError",))
        for node in nodes(path)
        if path not in asking
        and isinstance(node, ast.ExceptHandler)
        and node.type is not None
        and any(
            isinstance(each, ast.Name) and each.id == "NotImplementedError"
            for each in ast.walk(node.type)
        )
    ]
    assert not found, "catch jaxattn.core.dispatch.Refusal"


def test_an_op_has_two_overloads_at_most():
    """With an arena and without one: more of them hide the docstring from a reader."""

    def is_overload(node: ast.AST) -> bool:
        return isinstance(node, ast.FunctionDef) and any(
            isinstance(each, ast.Name) and each.id == "overload" for each in node.decorator_list
        )

    counts = collections.Counter(
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in files(OPS)
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef) and is_overload(node)
    )
    assert counts, "no op has overloads any more: drop this test"
    assert not [name for name, count in counts.items() if count > 2]


def test_an_op_has_a_dozen_options_at_most():
    long = [
        f"{path.relative_to(ROOT)}: {node.name}, {len(node.args.kwonlyargs)}"
        for path in files(OPS)
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and len(node.args.kwonlyargs) > MOST_OPTIONS
    ]
    assert not long, "what belongs together is a class, as gdn.Checkpoints is"
