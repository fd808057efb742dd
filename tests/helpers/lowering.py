"""Less work of JAX around a compilation; programs and results are the same.

JAX lowers each equation to a function of its own, and copies the body of that function to where the
equation is. This helps programs with many equal equations, and not the small programs of tests.
"""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

# JAX reuses an MLIR context ten times, and creating one takes two milliseconds.
MOST_PROGRAMS = 50
# (the primitives that JAX lowers where they are used, those that lower_where_used has added)
WHERE_USED: list[tuple[set[Any], set[Any]]] = []


def lower_quickly() -> None:
    """Enables all of this in the whole process."""
    lower_where_used()
    keep_contexts()
    hash_for_caches_only()
    keep_signatures()


def lower_where_used() -> None:
    """Lowers simple operations without a function of their own.

    This takes effect in the whole process. It does nothing if JAX has moved what it needs. Rules
    that trace a function, or that differ between platforms, still have their results cached.
    `lowered_as_functions` undoes it, for tests that read the scopes of compiled instructions.
    """
    try:
        from jax._src import core
        from jax._src.interpreters import mlir
        from jax._src.lax import lax, slicing

        by_platform = set().union(*mlir._platform_specific_lowerings.values())
        simple = {
            primitive
            for primitive in (*vars(lax).values(), *vars(slicing).values())
            if isinstance(primitive, core.Primitive) and primitive in mlir._lowerings
            if primitive not in by_platform
            if "lower_fun" not in getattr(mlir._lowerings[primitive].rule, "__qualname__", "")
        }
        uncached = mlir._uncacheable_primitives
    except (ImportError, AttributeError):
        return
    WHERE_USED.append((uncached, simple - uncached))
    uncached.update(simple)


@contextlib.contextmanager
def lowered_as_functions() -> Iterator[None]:
    """Lowers all equations as JAX does."""
    for uncached, added in WHERE_USED:
        uncached -= added
    try:
        yield
    finally:
        for uncached, added in WHERE_USED:
            uncached |= added


def keep_contexts() -> None:
    """Uses an MLIR context for `MOST_PROGRAMS` programs, in the whole process."""
    try:
        from jax._src.interpreters import mlir

        state, create = mlir._thread_local_context, mlir._create_ir_context
        state.set_local, mlir.make_ir_context  # noqa: B018
    except (ImportError, AttributeError):
        return

    def context() -> Any:
        kept, count = state.value or (None, MOST_PROGRAMS)
        if count >= MOST_PROGRAMS:
            kept, count = create(), 0
        state.set_local((kept, count + 1))
        return kept

    mlir.make_ir_context = context


def hash_for_caches_only() -> None:
    """Hashes a program for JAX's persistent cache only if there is one, in the whole process."""
    try:
        import jax
        from jax._src import compiler

        key = compiler._get_cache_key
        jax.config.jax_compilation_cache_dir  # noqa: B018
    except (ImportError, AttributeError):
        return

    def key_if_used(*args: Any, **kwargs: Any) -> str | None:
        return key(*args, **kwargs) if jax.config.jax_compilation_cache_dir else None

    compiler._get_cache_key = key_if_used


def keep_signatures() -> None:
    """Inspects the signature of functions of the same code once, in the whole process.

    JAX inspects each traced function, and most are closures without default arguments.
    """
    try:
        from jax._src import api_util

        inspected = api_util.fun_signature
    except (ImportError, AttributeError):
        return
    kept: dict[types.CodeType, Any] = {}

    def signature(function: Any) -> Any:
        if type(function) is not types.FunctionType or vars(function):
            return inspected(function)
        if function.__defaults__ or function.__kwdefaults__:
            return inspected(function)
        code = function.__code__
        if code not in kept:
            kept[code] = inspected(function)
        return kept[code]

    api_util.fun_signature = signature
