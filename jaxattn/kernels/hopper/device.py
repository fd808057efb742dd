"""The GPU that kernels need: its multiprocessors, shared memory, capability and assembler."""

import contextlib
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal, traced_for_hopper

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
