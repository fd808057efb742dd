"""A cache of executables on disk, with which the next process traces and compiles nothing.

JAX's own cache holds XLA's results, but lowering takes longer than XLA: Mosaic lowers kernels in
Python, ten of them in 16 seconds. So this cache holds whole steps next to JAX's files, each under a
hash of everything that decides the step:

    the source of this package    every file of it
    what is installed             Python, JAX, its plugins and NVIDIA's packages, by their versions
    the machine                   its device and driver; for a CPU the processor too
    settings                      of JAX, and the environment variables of XLA, JAX and Mosaic
    the step                      its name, model, limits, implementation, shapes of parameters

The cache does not store a model that has an attribute without a stable text, or a class of another
package.
"""

import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import os
import pickle
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from jaxattn.core.package_path import PACKAGE
from jaxattn.engine.runtime.process_state import PROCESS_STATE

SUFFIX, UNFINISHED = ".step", ".part"
KEPT_SECONDS = 30 * 86_400  # a file that no process has used for so long is deleted
INSTALLED = ("jax", "nvidia")
ENVIRONMENT = ("XLA_", "JAX_", "MOSAIC_", "PALLAS_", "TF_")
PLAIN = (str, int, float, bool, bytes, type(None))


class UnstableReprError(TypeError):
    """A value has no text that is equal only for equal values."""


class ExecutableCache:
    """The executables of one set of steps, in a folder.

    Whoever can write to the folder can run code in this process, so `load` ignores files that
    belong to other users, except root.

    Args:
        device: The device that runs the executables.
        decides: The values that decide the executables, in addition to their names and the machine.

    Raises:
        UnstableReprError: A value of `decides` has no stable text.
    """

    def __init__(self, folder: Path, device: jax.Device, key_parts: Sequence[object]):
        self._folder, self._device = folder, device
        self._facts = "\n".join((*facts_of_machine(device), *map(stable_repr, key_parts)))

    def load(self, name: str) -> jax.stages.Compiled | None:
        """Returns the executable of this name, or None if there is no intact file for it."""
        file = self._file(name)
        try:
            owner, data = file.stat().st_uid, file.read_bytes()
        except OSError:
            return None
        digest, packed = data[:32], data[32:]
        if owner not in (0, os.getuid()) or hashlib.sha256(packed).digest() != digest:
            return None
        facts, sizes, in_tree, out_tree, serialized = pickle.loads(packed)
        if facts != self._facts:
            return None
        try:
            loaded = serialize_executable.deserialize_and_load(
                serialized, in_tree, out_tree, self._device.client, [self._device]
            )
        except jax.errors.JaxRuntimeError:  # the driver no longer accepts it
            return None
        if sizes_of(loaded) != sizes:  # the plan would differ from that of the first start
            return None
        with contextlib.suppress(OSError):  # the file may belong to root or be on a read-only disk
            os.utime(file)
        return loaded

    def compiled(self, name: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compiles a step and stores it.

        On a CPU, XLA omits functions when it serializes an executable that came from JAX's cache,
        so such an executable is not stored; JAX's cache returns it again.
        """
        before = PROCESS_STATE.cache_hits()
        executable = lowered.compile()
        if self._device.platform != "cpu" or PROCESS_STATE.cache_hits() == before:
            self.store(name, executable)
        return executable

    def store(self, name: str, executable: jax.stages.Compiled) -> None:
        """Stores an executable, if it can be serialized and the folder is writable."""
        try:
            serialized, in_tree, out_tree = serialize_executable.serialize(executable)
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
            return
        sizes = sizes_of(executable)
        packed = pickle.dumps((self._facts, sizes, in_tree, out_tree, serialized))
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(self._file(name), hashlib.sha256(packed).digest() + packed)
            self._delete_old()
        except OSError:
            return  # the next start compiles again

    def _write(self, path: Path, data: bytes) -> None:
        """Writes a file atomically, so that another process reads all of it or nothing."""
        with tempfile.NamedTemporaryFile(dir=self._folder, suffix=UNFINISHED, delete=False) as file:
            try:
                file.write(data)
                file.flush()
                os.replace(file.name, path)
            except BaseException:  # a full disk, or Ctrl-C
                os.unlink(file.name)
                raise

    def _file(self, name: str) -> Path:
        key = hashlib.sha256(f"{name}\n{self._facts}".encode()).hexdigest()
        return self._folder / (key[:32] + SUFFIX)

    def _delete_old(self) -> None:
        least = time.time() - KEPT_SECONDS
        # A process that is killed while it writes leaves its temporary file.
        for file in (*self._folder.glob(f"*{SUFFIX}"), *self._folder.glob(f"*{UNFINISHED}")):
            if file.stat().st_mtime < least:
                file.unlink(missing_ok=True)


def disable_compilation_cache() -> None:
    """Turns JAX's cache off in this process, which is one of several of an engine.

    XLA's processes tune a program together: each times a part of its products, and waits up to 24
    hours for the results of the others. A process that has the executable in its cache would not
    take part. And JAX lets only process 0 store executables.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()


def folder_of_cache() -> Path | None:
    """Returns the folder of stored steps in JAX's cache folder; None if that cache is off."""
    given = jax.config.jax_compilation_cache_dir
    return Path(given) / "steps" if given and jax.config.jax_enable_compilation_cache else None


def sizes_of(executable: jax.stages.Compiled) -> tuple[int, ...]:
    """Returns XLA's figures of the executable's memory, in bytes."""
    found: Any = executable.memory_analysis()
    names = ("argument", "output", "alias", "temp", "generated_code")
    return tuple(getattr(found, f"{name}_size_in_bytes", 0) for name in names)


def facts_of_machine(
    device: jax.Device, environment: Mapping[str, str] = os.environ
) -> Iterable[str]:
    """Yields the facts that decide every executable in this process."""
    yield f"source {source_hash()}"
    yield f"python {sys.version}"
    yield from installed()
    yield f"device {device.platform} {device.device_kind} {device.client.platform_version}"
    yield f"devices {device.id} of {len(jax.devices())}"
    yield f"machine {platform.machine()}"
    if device.platform == "cpu":
        yield processor()
    yield from sorted(
        f"{name}={value}" for name, value in environment.items() if name.startswith(ENVIRONMENT)
    )
    yield from sorted(f"{name}={value!r}" for name, value in jax.config.values.items())
    # These settings may differ in this thread from the values above.
    yield f"{jax.config.jax_enable_x64} {jax.config.jax_default_matmul_precision}"


@functools.cache
def installed() -> tuple[str, ...]:
    """Returns JAX's and NVIDIA's packages with their versions, from the packages' metadata."""
    found = importlib.metadata.distributions()
    names = (
        f"{each.name} {each.version}" for each in found if (each.name or "").startswith(INSTALLED)
    )
    return tuple(sorted(names))


def source_hash(folder: Path = PACKAGE) -> str:
    """Returns a hash of the package's source."""
    hashed = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        data = file.read_bytes()
        hashed.update(f"{file.relative_to(folder)} {len(data)}\n".encode() + data)
    return hashed.hexdigest()


def processor(file: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the processor's model and features on Linux; elsewhere its name."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def stable_repr(value: object) -> str:
    """Returns a text of the value that differs from those of all other values.

    Raises:
        UnstableReprError: The value contains something whose text may omit a part of it.
    """
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(stable_repr, value))})"
    if isinstance(value, Mapping):
        pairs = (f"{stable_repr(key)}: {stable_repr(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (
            f"{f.name}={stable_repr(getattr(value, f.name))}" for f in dataclasses.fields(value)
        )
        return f"{_name(type(value))}({', '.join(fields)})"
    raise UnstableReprError(f"{type(value).__name__} has no stable representation")


def _name(kind: type) -> str:
    """Returns the name of a class of this package, whose source is part of the hash."""
    if kind.__module__.partition(".")[0] != PACKAGE.name:
        raise UnstableReprError(f"{kind.__module__}.{kind.__qualname__} belongs to another package")
    return f"{kind.__module__}.{kind.__qualname__}"
