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

# Streaming multiprocessors of an H200 or an H100 SXM. With another number MLA decode may split a
# row elsewhere, and its result may round differently.
NUM_SMS = 132
# The number of clusters of each size that run at a time, with one CTA per multiprocessor. A cluster
# has to fit in one of the groups of multiprocessors (GPCs), which have 10 to 18.
CLUSTERS_AT_A_TIME = {1: NUM_SMS, 2: 64, 3: 40, 4: 28, 8: 12}
# Bytes of shared memory of a multiprocessor; the system reserves 1 KiB of it for each CTA.
SHARED_BYTES, RESERVED_BYTES = 228 * 1024, 1024
# Mosaic's allocation of a CTA's shared memory: the alignment of each array, and the bytes of a
# barrier.
SHARED_ALIGNMENT, MBARRIER_BYTES = 1024, 8
# CUDA toolkits whose ptxas miscompiles masked kernels, as [first, last) of cudaRuntimeGetVersion.
# This version does not contain updates: 12.9.1, the last of CUDA 12, is also 12090. The
# attention_mgpu of jax itself refuses the same range.
MISCOMPILING_CUDA = (12080, 12091)


def require_hopper(op: str, *, interpret: bool) -> None:
    """Raises `Refusal`, with the reason, if the kernel cannot run."""
    if interpret or traced_for_hopper.value:
        return
    backend = jax.default_backend()
    if backend != "gpu":
        raise Refusal(
            f"{op}: the Mosaic GPU kernel needs a Hopper GPU, but JAX's default backend is "
            f"{backend!r}"
        )
    device = jax.devices()[0]
    if device.compute_capability != "9.0":
        raise Refusal(
            f"{op}: the Mosaic GPU kernel needs compute capability 9.0 (Hopper), but "
            f"{device.device_kind} has {device.compute_capability}"
        )
    from jax._src.lib import cuda_versions

    version = cuda_versions.cuda_runtime_get_version() if cuda_versions is not None else 0
    if MISCOMPILING_CUDA[0] <= version < MISCOMPILING_CUDA[1]:
        raise Refusal(
            f"{op}: ptxas of CUDA 12.8.0 to 12.9.1 miscompiles masked kernels, and this is CUDA "
            f"runtime {version}; jaxattn[cuda13] installs a later one"
        )


# A PTX version that CUDA 12.8's assembler accepts; that of 12.6 accepts 85. From this version on,
# the assembler supports Mosaic's copies of one contiguous piece of global memory to shared memory,
# which need no box of a tensor.
PTX_OF_PLAIN_COPIES = 86


@functools.cache
def plain_copies() -> bool:
    """Whether this machine's assembler supports such copies; True where nothing is assembled."""
    try:
        from jax._src.lib.mosaic_gpu import _mosaic_gpu_ext
    except ImportError:  # no plugin for a GPU
        return True
    version: int = _mosaic_gpu_ext._get_ptxas_isa_version()
    return version >= PTX_OF_PLAIN_COPIES


@functools.cache
def cache_ptxas_version() -> None:
    """Caches the assembler's version, for which Mosaic otherwise starts a process each time it
    asks.

    Mosaic asks at each conversion from or to 8 bits and fewer, and holds Python's lock meanwhile.
    """
    with contextlib.suppress(ImportError, AttributeError):  # no plugin for a GPU, or another JAX
        from jax._src.lib.mosaic_gpu import _mosaic_gpu_ext

        asked = _mosaic_gpu_ext._get_ptxas_isa_version
        _mosaic_gpu_ext._get_ptxas_isa_version = functools.cache(asked)


def shared_bytes(scratch: Iterable[Any]) -> int:
    """Returns the bytes of shared memory that Mosaic allocates for a CTA's arrays and barriers.

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
