"""GPU memory of this process, as NVIDIA's management library (NVML) counts it.

Unlike the driver's free bytes, this number does not depend on other processes.
"""

import ctypes
import os

import jax

LIBRARY = "libnvidia-ml.so.1"
TOO_SMALL = 7  # NVML_ERROR_INSUFFICIENT_SIZE: the output array was too short
UNKNOWN = 2**64 - 1


class _NvmlProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_t."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("nbytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def process_bytes(device: jax.Device) -> int | None:
    """Returns the bytes of the GPU that this process holds, including JAX's pool.

    Returns None if NVML is missing or does not know the process, as in some containers.
    """
    if device.platform != "gpu":
        return None
    try:
        cuda, library = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    place = ctypes.create_string_buffer(32)
    ordinal, handle = ctypes.c_int(), ctypes.c_void_p()
    # NVML orders GPUs differently from CUDA, and ignores CUDA_VISIBLE_DEVICES.
    if (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(ordinal), device.local_hardware_id or 0)
        or cuda.cuDeviceGetPCIBusId(place, len(place), ordinal)
        or library.nvmlInit_v2()
    ):
        return None
    try:
        if library.nvmlDeviceGetHandleByPciBusId_v2(place, ctypes.byref(handle)):
            return None
        return _of(os.getpid(), library, handle)
    finally:
        library.nvmlShutdown()


def _of(pid: int, library: ctypes.CDLL, handle: ctypes.c_void_p) -> int | None:
    room = 64
    while True:
        count, found = ctypes.c_uint(room), (_NvmlProcessInfo * room)()
        failed = library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), found)
        if failed != TOO_SMALL:
            break
        room *= 2
    if failed:
        return None
    own = [each.nbytes for each in found[: count.value] if each.pid == pid]
    return sum(own) if own and UNKNOWN not in own else None
