"""Executables that are kept for the next process, which then traces, lowers and compiles nothing.

JAX's own cache keeps what XLA makes of a program. To write the program down takes longer: a Mosaic
kernel is lowered in Python, ten of them in 16 seconds. So whole steps are kept beside JAX's files,
each under a hash of everything that decides it:

    the source of this package    every file of it
    what is installed             Python, JAX, its plugins and NVIDIA's packages, by their versions
    the machine                   its device and driver; for a CPU the processor too
    settings                      of JAX, and what XLA, JAX and Mosaic read of the environment
    the step                      its name, model, limits, implementation, shapes of parameters

A model with an attribute that this file cannot write down, or with a class of another package, is
not kept.
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
KEPT_SECONDS = 30 * 86_400  # a file that nothing has used for so long is deleted
INSTALLED = ("jax", "nvidia")
ENVIRONMENT = ("XLA_", "JAX_", "MOSAIC_", "PALLAS_", "TF_")
PLAIN = (str, int, float, bool, bytes, type(None))


class UnstableReprError(TypeError):
    """A value that cannot be written down so that equal texts mean equal values."""


class ExecutableCache:
    """Executables of one set of steps, in a folder.

    Whoever can write to the folder can run code in this process: files of other users are not read.

    Args:
        device: that runs them.
        decides: what decides the executables, beside their names and the machine.

    Raises:
        UnstableReprError: something of `decides` cannot be written down.
    """

    def __init__(self, folder: Path, device: jax.Device, decides: Sequence[object]):
        self._folder, self._device = folder, device
        self._facts = "\n".join((*facts_of_machine(device), *map(stable_repr, decides)))

    def load(self, name: str) -> jax.stages.Compiled | None:
        """The executable of this name; None where there is none, or none that is whole."""
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
        except jax.errors.JaxRuntimeError:  # the driver does not take it any more
            return None
        if sizes_of(loaded) != sizes:  # the plan would not be that of the first start
            return None
        with contextlib.suppress(OSError):  # of root, or on a disk that cannot be written to
            os.utime(file)
        return loaded

    def compiled(self, name: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compiles a step and keeps it.

        XLA for the CPU leaves out functions of an executable that JAX's cache gave, so such a one
        is not kept: JAX's cache gives it again.
        """
        before = PROCESS_STATE.cache_hits()
        executable = lowered.compile()
        if self._device.platform != "cpu" or PROCESS_STATE.cache_hits() == before:
            self.store(name, executable)
        return executable

    def store(self, name: str, executable: jax.stages.Compiled) -> None:
        """Keeps an executable, if its kind can be kept and the folder be written to."""
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

    def _write(self, to: Path, data: bytes) -> None:
        """Another process reads all of the file, or none."""
        with tempfile.NamedTemporaryFile(dir=self._folder, suffix=UNFINISHED, delete=False) as file:
            try:
                file.write(data)
                file.flush()
                os.replace(file.name, to)
            except BaseException:  # a full disk, or Ctrl-C
                os.unlink(file.name)
                raise

    def _file(self, name: str) -> Path:
        key = hashlib.sha256(f"{name}\n{self._facts}".encode()).hexdigest()
        return self._folder / (key[:32] + SUFFIX)

    def _delete_old(self) -> None:
        least = time.time() - KEPT_SECONDS
        # A process that was killed while it wrote leaves its file.
        for file in (*self._folder.glob(f"*{SUFFIX}"), *self._folder.glob(f"*{UNFINISHED}")):
            if file.stat().st_mtime < least:
                file.unlink(missing_ok=True)


def disable_compilation_cache() -> None:
    """Turns JAX's cache off in this process, which is one of several of an engine.

    XLA's processes tune a program together: each times a part of its products, and waits up to 24
    hours for what the others have found. One that has the executable already tunes nothing. And
    JAX lets process 0 alone keep executables.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()


def folder_of_cache() -> Path | None:
    """Where steps are kept: beside what JAX keeps, if it keeps anything."""
    given = jax.config.jax_compilation_cache_dir
    return Path(given) / "steps" if given and jax.config.jax_enable_compilation_cache else None


def sizes_of(executable: jax.stages.Compiled) -> tuple[int, ...]:
    """What XLA says of its memory, in bytes."""
    found: Any = executable.memory_analysis()
    names = ("argument", "output", "alias", "temp", "generated_code")
    return tuple(getattr(found, f"{name}_size_in_bytes", 0) for name in names)


def facts_of_machine(
    device: jax.Device, environment: Mapping[str, str] = os.environ
) -> Iterable[str]:
    """What decides every executable here."""
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
    # These may differ in this thread from the values above.
    yield f"{jax.config.jax_enable_x64} {jax.config.jax_default_matmul_precision}"


@functools.cache
def installed() -> tuple[str, ...]:
    """JAX's and NVIDIA's packages with their versions, which parsing every package's file tells."""
    found = importlib.metadata.distributions()
    names = (
        f"{each.name} {each.version}" for each in found if (each.name or "").startswith(INSTALLED)
    )
    return tuple(sorted(names))


def source_hash(folder: Path = PACKAGE) -> str:
    """A hash of the package's source."""
    hashed = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        data = file.read_bytes()
        hashed.update(f"{file.relative_to(folder)} {len(data)}\n".encode() + data)
    return hashed.hexdigest()


def processor(file: Path = Path("/proc/cpuinfo")) -> str:
    """What the processor is and can do, as Linux tells it; elsewhere its name."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def stable_repr(value: object) -> str:
    """A value as a text that no other value has.

    Raises:
        UnstableReprError: it holds something whose text may leave a part of it out.
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
    raise UnstableReprError(f"{type(value).__name__} cannot be written down")


def _name(kind: type) -> str:
    """A class of this package, whose source is among what decides an executable."""
    if kind.__module__.partition(".")[0] != PACKAGE.name:
        raise UnstableReprError(f"{kind.__module__}.{kind.__qualname__} is of another package")
    return f"{kind.__module__}.{kind.__qualname__}"
