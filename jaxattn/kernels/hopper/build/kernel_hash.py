"""The hash by which the runtime finds a compiled kernel, made the same for equal kernels.

Up to JAX 0.11 Mosaic writes a name with a counter of the process into a kernel's module, and hashes
both. Two programs that launch one kernel would therefore compile it twice, and JAX's compilation
cache would miss a program that another process has lowered in another order.
"""

import hashlib
import io
from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import mlir

from jaxattn.kernels.hopper.mlir import ir, mgpu

TARGET = "mosaic_gpu_v2"
_CONFIG, _NAME = "mhlo.backend_config", "mosaic_gpu.dump_basename"


def unify_kernels(text: jax.stages.Lowered) -> None:
    """Gives equal kernels of lowered programs equal modules and hashes, in place."""
    renamed: dict[bytes, bytes] = {}

    def rename(operation: Any) -> None:
        config = {each.name: each.attr for each in operation.attributes[_CONFIG]}
        given = ir.StringAttr(config["module"]).value_bytes
        if given not in renamed:
            renamed[given] = _without_counter(given)
        module = renamed[given]
        config["module"] = ir.StringAttr.get(module)
        config["kernel_hash"] = ir.StringAttr.get(hashlib.sha256(module).digest())
        operation.attributes[_CONFIG] = ir.DictAttr.get(config)

    each_kernel(text, rename)


def each_kernel(text: jax.stages.Lowered, look: Callable[[Any], None]) -> None:
    """Calls `look` with each operation of a lowered program that launches a kernel."""

    def at(operation: ir.Operation) -> ir.WalkResult:
        if operation.name == "stablehlo.custom_call":
            if ir.StringAttr(operation.attributes["call_target_name"]).value == TARGET:
                look(operation)
        return ir.WalkResult.ADVANCE

    module: Any = text.compiler_ir("stablehlo")
    with module.context, ir.Location.unknown():
        module.operation.walk(at, ir.WalkOrder.PRE_ORDER)


def _without_counter(module: bytes) -> bytes:
    """Returns a kernel's module under its own name, which profilers show, without the counter."""
    with mlir.make_ir_context() as context, ir.Location.unknown():
        mgpu.dialect.register_dialect(context)
        context.allow_unregistered_dialects = True
        operation: Any = ir.Module.parse(module).operation
        if _NAME not in operation.attributes:
            return module
        operation.attributes[_NAME] = operation.attributes["sym_name"]
        written = io.BytesIO()
        operation.write_bytecode(written, desired_version=0)
        return written.getvalue()
