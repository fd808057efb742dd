"""One executable for equal programs: what XLA has compiled once it does not compile again.

Each engine and each call of a function that is defined in a test has jitted functions of its own,
so JAX compiles the same text again and again. JAX still traces and lowers each of them, and reports
that it compiles each; a program is equal if its text, its options and its devices are.
"""

import contextlib
import ctypes
import io
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest

# What leave_out_locations has replaced: (module, function), if it has.
LOCATIONS: list[tuple[Any, Any]] = []
MOST = 1024  # programs that are kept; those that were used last


def share_executables() -> None:
    """For the whole process. Where JAX has moved what this replaces, it stays as it is."""
    try:
        from jax._src import compiler

        compile_one = compiler.backend_compile_and_load
    except (ImportError, AttributeError):
        return
    kept: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    def compiled(backend: Any, module: Any, devices: Any, options: Any, host_callbacks: Any) -> Any:
        # A callback is of this call alone; another platform's executables may hold its memory.
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
    """For the whole process: operations of a program do not say where in the source they are from.

    A name and a place for each take a twelfth of an engine's time to compile, since JAX makes them
    and XLA carries them along. `with_locations` puts them back. Where JAX has moved what this
    replaces, it stays as it is.

    Args:
        scopes: keep the names of scopes and operations, which tests of compiled text read.
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
    """For tests that read in compiled text of which scope or function an instruction is."""
    with pytest.MonkeyPatch.context() as patch:
        for module, function in LOCATIONS:
            patch.setattr(module, "source_info_to_location", function)
        yield


def keep_freed_memory() -> None:
    """For the whole process: malloc gives little back to the system, where it is glibc's.

    XLA and LLVM free what a compilation took, and the next one takes as much: a twentieth of the
    time went into it.
    """
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 64 * 2**20)
    mallopt(mmap_threshold, 32 * 2**20)
