"""Peer access between the GPUs of a process, as the CUDA driver reports it."""

import ctypes
import itertools
from collections.abc import Sequence

import jax


def peers_reach(devices: Sequence[jax.Device]) -> bool:
    """Whether each of these GPUs can write into the memory of each other one.

    GPUs of one board can, over NVLink. Others may not, as in some virtual machines, where XLA's
    collectives use the host's memory. The result is False for devices of several processes, none of
    which knows all addresses, and True for devices other than GPUs and for a single GPU.
    """
    if any(each.process_index != jax.process_index() for each in devices):
        return False
    if len(devices) < 2 or devices[0].platform != "gpu":
        return True
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    if cuda.cuInit(0):
        return False
    numbers = []
    for device in devices:
        number = ctypes.c_int()
        if cuda.cuDeviceGet(ctypes.byref(number), device.local_hardware_id or 0):
            return False
        numbers.append(number.value)
    for own, other in itertools.permutations(numbers, 2):
        reached = ctypes.c_int()
        if cuda.cuDeviceCanAccessPeer(ctypes.byref(reached), own, other) or not reached.value:
            return False
    return True
