"""One executable for equal programs: XLA does not compile a program twice.

Each engine, and each call of a function defined in a test, has its own jitted functions, so JAX
would compile the same text again and again. JAX still traces and lowers each function, and reports
a compilation. Programs are equal if their text, options and devices are.
"""

import contextlib
import ctypes
import io
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest

# (module, function) that leave_out_locations has replaced, if it has.
LOCATIONS: list[tuple[Any, Any]] = []
MOST = 1024  # number of programs to keep, the most recently used ones


def share_executables() -> None:
    """Enables this in the whole process. It does nothing if JAX has moved the replaced function."""
    try:
        from jax._src import compiler

        compile_one = compiler.backend_compile_and_load
    except (ImportError, AttributeError):
        return
    kept: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    def compiled(backend: Any, module: Any, devices: Any, options: Any, host_callbacks: Any) -> Any:
        # A callback belongs to one call; executables of another platform may hold its memory.
        if host_callbacks or backend.platform != "cpu":
            return compile_one(backend, module, devices, options, host_callbacks)
        text = io.BytesIO()
        module.operation.write_bytecode(text)
        key = (id(backend), text.getvalue(), options.SerializeAsString(), str(devices))
        if key not in kept:
            kept[key] = compile_one(backend, module, devices, options, host_callbacks)
            while len(kept) > MOST:
                kept.popitem(last=False)
        kept.move_to_end(key)
        return kept[key]

    compiler.backend_compile_and_load = compiled


def leave_out_locations(*, scopes: bool = False) -> None:
    """Removes the source locations of a program's operations, in the whole process.

    JAX creates a name and a location for each operation, and XLA passes them on, which takes a
    twelfth of an engine's compile time. `with_locations` restores them. It does nothing if JAX has
    moved the replaced function.

    Args:
        scopes: Whether to keep the names of scopes and operations, which tests of compiled text
            read.
    """
    try:
        from jax._src.interpreters import mlir
        from jax._src.lib.mlir import ir

        mlir.source_info_to_location  # noqa: B018
    except (ImportError, AttributeError):
        return

    def named(ctx: Any, primitive: Any, name_stack: Any, traceback: Any) -> Any:
        return ir.Location.name(f"{name_stack}/{primitive.name}" if primitive else str(name_stack))

    LOCATIONS.append((mlir, mlir.source_info_to_location))
    mlir.source_info_to_location = named if scopes else lambda *_: ir.Location.unknown()


@contextlib.contextmanager
def with_locations() -> Iterator[None]:
    """Restores locations for tests that read the scope or function of a compiled instruction."""
    with pytest.MonkeyPatch.context() as patch:
        for module, function in LOCATIONS:
            patch.setattr(module, "source_info_to_location", function)
        yield


def keep_freed_memory() -> None:
    """Lets malloc, if it is glibc's, return little memory to the system, in the whole process.

    XLA and LLVM free the memory of a compilation, and the next one needs as much. This took 5% of
    the time.
    """
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 64 * 2**20)
    mallopt(mmap_threshold, 32 * 2**20)
