"""A device's memory: as the driver reports it, in JAX's pool, and outside of both.

    total = pool (JAX's allocator) + outside (context, code, libraries, other processes) + free

No allocator's statistics include the driver's part. It grows when code first runs: a kernel that
uses TMA descriptors, a library's handle. So the engine measures it around the warm-up, from `free`.
"""

import ctypes
import dataclasses
import os

import jax

MIB, GIB = 2**20, 2**30


class DeviceError(ValueError):
    """A device is unknown, or its memory sizes contradict each other."""


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device, in bytes.

    Attributes:
        name: The name of the device.
        total: The total memory.
        free: The memory that the driver can still allocate; None if unknown.
        pool: The memory that JAX's allocator has taken from the driver, in use or not.
        in_use: The bytes of the pool that are in use.
        limit: The maximum of JAX's allocator (XLA_PYTHON_CLIENT_MEM_FRACTION of total).

    Raises:
        DeviceError: A number is not positive, or the numbers contradict each other.
    """

    name: str
    total: int
    free: int | None = None
    pool: int = 0
    in_use: int = 0
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.total < 1:
            raise DeviceError(
                f"{self.name}: the memory of a device must be at least 1 byte; got {self.total:,}"
            )
        if self.free is not None and not 0 <= self.free <= self.total:
            raise DeviceError(
                f"{self.name}: the free bytes must be from 0 to {self.total:,}; got {self.free:,}"
            )

    @property
    def outside(self) -> int | None:
        """Memory that is neither free nor in JAX's pool; None if it was not measured."""
        return None if self.free is None else max(self.total - self.free - self.pool, 0)


# Total bytes as the driver reports them (cuMemGetInfo), a little less than in the data sheet.
KNOWN = {
    "h200": DeviceMemory("NVIDIA H200", 150_109_880_320),
    "h100": DeviceMemory("NVIDIA H100 80GB", 84_942_979_072),
    "h20": DeviceMemory("NVIDIA H20", 102_010_650_624),
}


def known_device(name: str) -> DeviceMemory:
    """Returns a device by its name, or one of any size by a number of GiB ("141GiB").

    Raises:
        DeviceError: No device has that name.
    """
    wanted = name.strip().lower().removeprefix("nvidia").strip()
    if wanted in KNOWN:
        return KNOWN[wanted]
    if wanted.endswith("gib"):
        try:
            size = float(wanted.removesuffix("gib"))
        except ValueError:
            size = 0.0
        if 0 < size < 2**20:
            return DeviceMemory(f"a device of {size:g} GiB", int(size * GIB))
    raise DeviceError(
        f"unknown device {name!r}: use one of {', '.join(KNOWN)}, or its memory such as 96GiB"
    )


def device_memory(device: jax.Device) -> DeviceMemory | None:
    """Returns the device's current memory; None if it is unknown.

    The numbers of a GPU come from the driver and the allocator. A CPU has the machine's memory.
    """
    stats = device.memory_stats() or {}
    if device.platform == "gpu":
        free, total = _driver(device.local_hardware_id or 0) or (None, stats.get("bytes_limit", 0))
        return DeviceMemory(
            device.device_kind,
            total,
            free,
            pool=stats.get("pool_bytes", 0),
            in_use=stats.get("bytes_in_use", 0),
            limit=stats.get("bytes_limit"),
        )
    if "bytes_limit" in stats:
        return DeviceMemory(device.device_kind, stats["bytes_limit"])
    names = getattr(os, "sysconf_names", {})
    if device.platform == "cpu" and "SC_PHYS_PAGES" in names:
        return DeviceMemory("cpu", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return None


def _driver(ordinal: int) -> tuple[int, int] | None:
    """Returns (free, total) from the CUDA driver, in JAX's context; None without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    handle, context, previous = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(handle), ordinal):
        return None
    if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle):
        return None
    try:
        if cuda.cuCtxPushCurrent_v2(context):
            return None
        failed = cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        cuda.cuCtxPopCurrent_v2(ctypes.byref(previous))
        return None if failed else (free.value, total.value)
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(handle)
