"""Compiles the kernels of lowered programs beside each other, and each of them once.

XLA comes to a program's kernels one after another, and two programs that hold one kernel both
compile it. Mosaic keeps what it has compiled, for the process and by the kernel's hash. So

    each = Beside(pool, device)
    kernels = each.compile(jax.jit(step).lower(...))
    concurrent.futures.wait(kernels)

compiles each kernel as a program of its own, many at a time. Whoever compiles the step after that
finds its kernels compiled.
"""

import concurrent.futures
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.kernels.hopper.build.kernel_hash import TARGET, each_kernel
from jaxattn.kernels.hopper.mlir import ir

# What decides a compiled kernel. Its operands do not: they are given when it is launched.
DECIDES = ("kernel_hash", "module", "use_custom_barrier")

type Kernel = dict[str, bytes | bool]
type Compiling = concurrent.futures.Future[None]


class ParallelCompiler:
    """Kernels that are compiled or being compiled.

    Args:
        pool: whose threads compile them. Of those that wait for kernels, none may begin before
            `compile` has returned: the pool begins its tasks in order.
        device: that the kernels are for.
    """

    def __init__(self, pool: concurrent.futures.Executor, device: jax.Device):
        self._pool, self._device = pool, device
        self._begun: dict[bytes | bool, Compiling] = {}

    def compile(self, text: jax.stages.Lowered) -> Sequence[Compiling]:
        """Begins with the kernels of a program that are new; returns all of its kernels.

        A kernel that cannot be compiled ends with an error here. Whoever compiles the program gets
        the same error, with the program's name.
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
    """What decides each of a lowered program's kernels. Launches of one kernel are alike."""
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
