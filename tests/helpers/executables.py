"""One executable for equal programs: what XLA has compiled once it does not compile again.

Each engine and each call of a function that is defined in a test has jitted functions of its own,
so JAX compiles the same text again and again. JAX still traces and lowers each of them, and reports
that it compiles each; a program is equal if its text, its options and its devices are.
"""

import io
from collections import OrderedDict
from typing import Any

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
