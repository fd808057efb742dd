"""Compiles the kernels of lowered programs in parallel, and each of them once.

XLA compiles a program's kernels one after another, and two programs that contain the same kernel
both compile it. Mosaic keeps compiled kernels for the lifetime of the process, by the kernel's
hash. So

    each = ParallelCompiler(pool, device)
    kernels = each.compile(jax.jit(step).lower(...))
    concurrent.futures.wait(kernels)

compiles each kernel as a program of its own, many at a time. A later compilation of the step finds
its kernels compiled.
"""

import concurrent.futures
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.kernels.hopper.build.kernel_hash import TARGET, each_kernel
from jaxattn.kernels.hopper.mlir import ir

# The attributes that determine a compiled kernel. Its operands do not: they are given at launch.
DECIDES = ("kernel_hash", "module", "use_custom_barrier")

type Kernel = dict[str, bytes | bool]
type Compiling = concurrent.futures.Future[None]


class ParallelCompiler:
    """The kernels that are compiled or being compiled.

    Args:
        pool: The executor whose threads compile. A task that waits for kernels must not start
            before `compile` has returned: the pool starts its tasks in order.
        device: The device that the kernels are for.
    """

    def __init__(self, pool: concurrent.futures.Executor, device: jax.Device):
        self._pool, self._device = pool, device
        self._begun: dict[bytes | bool, Compiling] = {}

    def compile(self, text: jax.stages.Lowered) -> Sequence[Compiling]:
        """Starts to compile those kernels of a program that are new; returns the futures of all its
        kernels.

        A future of a kernel that cannot be compiled ends with an error. The compilation of the
        program raises the same error, with the program's name.
        """
        found = {kernel["kernel_hash"]: kernel for kernel in kernels_of(text)}
        for key, kernel in found.items():
            if key not in self._begun:
                self._begun[key] = self._pool.submit(self._compile, kernel)
        return [self._begun[key] for key in found]

    def _compile(self, kernel: Kernel) -> None:
        some = jax.ShapeDtypeStruct((1,), jnp.int32)
        call = jax.ffi.ffi_call(TARGET, some)
        where = jax.sharding.SingleDeviceSharding(self._device)
        given = jax.ShapeDtypeStruct(some.shape, some.dtype, sharding=where)
        jax.jit(lambda x: call(x, **kernel)).lower(given).compile()


def kernels_of(text: jax.stages.Lowered) -> list[Kernel]:
    """Returns the attributes that determine each of a lowered program's kernels. Launches of one
    kernel have the same."""
    found: list[Kernel] = []

    def look(operation: Any) -> None:
        config = {each.name: each.attr for each in operation.attributes["mhlo.backend_config"]}
        found.append({name: _plain(config[name]) for name in DECIDES})

    each_kernel(text, look)
    return found


def _plain(attribute: Any) -> bytes | bool:
    if isinstance(attribute, ir.BoolAttr):
        return attribute.value
    return ir.StringAttr(attribute).value_bytes
