"""XLA compiles a program once, however often JAX asks for it.

JAX keeps what it compiled by the Python function, so a new `jax.jit` or engine of the same model
compiles the same program again. The text of a program, what it is compiled with and for which
devices say what comes out. Programs with callbacks hold their functions, so they are left out.
"""

import hashlib
import io
from typing import Any


def compile_programs_once() -> None:
    """For the whole process. Where JAX has moved what this replaces, it stays as it is."""
    try:
        from jax._src import compiler

        compile_program = compiler.backend_compile_and_load
    except (ImportError, AttributeError):
        return
    kept: dict[bytes, Any] = {}

    def once(backend: Any, module: Any, devices: Any, options: Any, callbacks: Any) -> Any:
        if callbacks:
            return compile_program(backend, module, devices, options, callbacks)
        text = io.BytesIO()
        module.operation.write_bytecode(text)
        told = (text.getvalue(), options.SerializeAsString(), str(devices).encode())
        key = hashlib.sha256(b"".join(hashlib.sha256(x).digest() for x in told)).digest()
        if key not in kept:
            kept[key] = compile_program(backend, module, devices, options, callbacks)
        return kept[key]

    compiler.backend_compile_and_load = once
