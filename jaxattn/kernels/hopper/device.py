"""Device requirements of the kernels, and the interpreter that runs them elsewhere."""

import contextlib
import functools
import math
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxattn.core.dispatch import PACKAGE, Refusal, traced_for_hopper
from jaxattn.kernels.hopper.mlir import utils
from jaxattn.kernels.hopper.ptx import asm

# Streaming multiprocessors of an H200 or an H100 SXM. With another number MLA decode may cut a row
# elsewhere, and round its result otherwise.
NUM_SMS = 132
# Clusters of so many blocks that run at a time, a block on a multiprocessor: a cluster has to fit
# in one of the groups of multiprocessors, which are of 10 to 18.
CLUSTERS_AT_A_TIME = {1: NUM_SMS, 2: 64, 3: 40, 4: 28, 8: 12}
# Shared memory of a multiprocessor in bytes, of which each block has 1 KiB that is not its own.
SHARED_BYTES, RESERVED_BYTES = 228 * 1024, 1024
# Of shared memory that Mosaic gives a block: where each array begins, and what a barrier takes.
SHARED_ALIGNMENT, MBARRIER_BYTES = 1024, 8
# CUDA toolkits whose ptxas miscompiles masked kernels, as [first, last) of cudaRuntimeGetVersion,
# which has no updates: 12.9.1, the last of CUDA 12, is 12090 there too. jax's own attention_mgpu
# refuses the same range.
MISCOMPILING_CUDA = (12080, 12091)

# Threads of XLA's pool from which on the interpreter is safe: the threads of a block, up to 4 here,
# wait for one another, each in a callback that holds a thread of the pool.
INTERPRETER_THREADS = 8
JAX = str(Path(jax.__file__).parent) + os.sep


def _host_threads() -> int:
    """Of XLA's pool, as XLA counts them when JAX's backend starts."""
    for name in ("PJRT_NPROC", "NPROC"):
        if (given := os.environ.get(name, "")).isdigit():
            return int(given)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _warn_of_few_threads() -> None:
    """Once a process."""
    if (threads := _host_threads()) < INTERPRETER_THREADS:
        warnings.warn(
            "the interpreter of kernels may wait for ever: it needs a host thread for each thread "
            f"of a kernel, and XLA's pool has {threads}; set the environment variable "
            "PJRT_NPROC=16 before JAX is imported",
            skip_file_prefixes=(PACKAGE, JAX),
        )


def interpret_mode(interpret: bool, *, detect_races: bool = False) -> Any:
    """The `interpret=` of `plgpu.kernel`: the interpreter fills fresh memory with NaN."""
    if interpret:
        _warn_of_few_threads()
    return plgpu.InterpretGPUParams(detect_races=detect_races) if interpret else False


def require_hopper(op: str, *, interpret: bool) -> None:
    """Refuses, by `Refusal` with the reason, where the kernel cannot run."""
    if interpret or traced_for_hopper.value:
        return
    backend = jax.default_backend()
    if backend != "gpu":
        raise Refusal(
            f"{op}: the Mosaic GPU kernel needs a Hopper GPU, and JAX's default backend is "
            f"{backend!r}"
        )
    device = jax.devices()[0]
    if device.compute_capability != "9.0":
        raise Refusal(
            f"{op}: the Mosaic GPU kernel needs compute capability 9.0 (Hopper), and "
            f"{device.device_kind} has {device.compute_capability}"
        )
    from jax._src.lib import cuda_versions

    version = cuda_versions.cuda_runtime_get_version() if cuda_versions is not None else 0
    if MISCOMPILING_CUDA[0] <= version < MISCOMPILING_CUDA[1]:
        raise Refusal(
            f"{op}: ptxas of CUDA 12.8.0 to 12.9.1 miscompiles masked kernels, and this is CUDA "
            f"runtime {version}; jaxattn[cuda13] brings a later one"
        )


# Of the PTX that CUDA 12.8's assembler takes, 12.6's 85. From here on it copies one piece of global
# memory to shared memory as Mosaic asks for it: where no box of a tensor is wanted.
PTX_OF_PLAIN_COPIES = 86


@functools.cache
def plain_copies() -> bool:
    """Whether this machine's assembler knows them; where nothing is assembled, yes."""
    try:
        from jax._src.lib.mosaic_gpu import _mosaic_gpu_ext
    except ImportError:  # no plugin for a GPU
        return True
    version: int = _mosaic_gpu_ext._get_ptxas_isa_version()
    return version >= PTX_OF_PLAIN_COPIES


@functools.cache
def cache_ptxas_version() -> None:
    """Keeps the assembler's version, for which Mosaic starts a program each time it asks.

    It asks at each conversion from or to 8 bits and fewer, and holds Python's lock meanwhile.
    """
    with contextlib.suppress(ImportError, AttributeError):  # no plugin for a GPU, or another JAX
        from jax._src.lib.mosaic_gpu import _mosaic_gpu_ext

        asked = _mosaic_gpu_ext._get_ptxas_isa_version
        _mosaic_gpu_ext._get_ptxas_isa_version = functools.cache(asked)


def swizzled(dtype: DTypeLike, width: int = 128) -> Any:
    """The shared-memory layout that TMA and wgmma agree on: tiles of 8 rows of `width` bytes."""
    tiling = plgpu.TilingTransform((8, width // jnp.dtype(dtype).itemsize))  # type: ignore[abstract]
    return (tiling, plgpu.SwizzleTransform(width))  # type: ignore[abstract]


def shared_bytes(scratch: Iterable[Any]) -> int:
    """Bytes of shared memory that Mosaic allocates for a block's arrays and barriers.

    Args:
        scratch: `plgpu.SMEM`, `plgpu.RefUnion`, `plgpu.Barrier` and `plgpu.ClusterBarrier`.
    """
    arrays = barriers = 0
    for each in jax.tree.leaves(list(scratch)):
        if isinstance(each, plgpu.Barrier | plgpu.ClusterBarrier):
            count = each.num_barriers
            barriers += count if isinstance(count, int) else math.prod(count)
            continue
        size = math.prod(each.shape) * jnp.dtype(each.dtype).itemsize
        arrays += -(-size // SHARED_ALIGNMENT) * SHARED_ALIGNMENT
    return arrays + barriers * MBARRIER_BYTES


def warpgroup_barrier(*, interpret: bool) -> None:
    """A warpgroup's warps wait for each other, and see what the others stored in shared memory.

    `plgpu.commit_smem` also makes that visible to TMA and wgmma, by a fence that waits for all of
    a thread's loads and stores of global memory as well.
    """
    if interpret:  # which knows no other way
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def barrier(_: Any) -> None:
        utils.warpgroup_barrier()

    barrier()


def fence_proxy_async(*, interpret: bool) -> None:
    """What a thread stored in shared memory is seen by TMA and wgmma of whoever waits for the
    barrier that the thread, as all of its warpgroup, arrives at next.

    `plgpu.commit_smem` has the warpgroup's warps wait for each other as well.
    """
    if interpret:
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        asm("fence.proxy.async.shared::cta;", [], [], "~{memory}")

    fence()


def issue_loads(*, interpret: bool) -> None:
    """Loads of memory above this line are under way before anything below it waits for one.

    ptxas moves a load down to its use, behind what waits for others, but not past a loop. This one
    ends at once: it waits for the clock not to be 0.
    """
    if interpret:
        return

    @plgpu.inline_mgpu()
    def barrier(_: Any) -> None:
        asm(
            "{ .reg .pred at; .reg .b32 now; again: mov.u32 now, %clock; setp.eq.u32 at, now, 0; "
            "@at bra again; }", [], [], "~{memory}", convergent=True,
        )  # fmt: skip

    barrier()


def pin_value(x: jax.Array, layout: Any, *, interpret: bool) -> jax.Array:
    """x, made before whatever waits for other threads behind this line.

    Left to itself, ptxas makes a number where it is needed, and thus behind a wait in which there
    would have been the time for it. It does not move the shuffle here, which moves nothing.
    """
    if interpret:
        return x

    def pinned(_: Any, x: Any) -> Any:
        return x._pointwise(lambda register: utils.shfl_bfly(register, 0))

    out = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=out)(pinned)(x)


def wgmma(accumulator: jax.Array | None, a: Any, b: Any, *, shape: Any, interpret: bool) -> Any:
    """`accumulator + a @ b` in float32 on the tensor cores, finished on return.

    Args:
        accumulator: a value in the WGMMA layout, or `None` for zero.
        a: shared memory [M, K].
        b: shared memory [K, N].
        shape: (M, N).
        interpret: JAX 0.11.2's interpreter knows neither `wgmma` under `pl.run_state` nor a store
            to an accumulator: there the product goes to an accumulator of its own and is added.
    """

    def product(ref: Any) -> Any:
        plgpu.wgmma(ref, a, b)
        return ref[...]

    if accumulator is None:
        return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
    if interpret:
        return accumulator + pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(accumulator))
