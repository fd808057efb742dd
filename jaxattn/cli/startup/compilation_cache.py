"""The folder that caches compiled executables for the next start.

JAX's cache key contains the program, the options, and the versions of jaxlib and of the device's
software. It lacks the processor, and code for one processor may crash on another. Each kind of
machine, and each version of this package, therefore has a separate folder.
"""

import hashlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import jax

from jaxattn import __version__
from jaxattn.cli.options.parser import InputError
from jaxattn.engine.compilation.executable_cache import processor

NONE = Path("none")
LEAST_SECONDS = 0.1  # executables that compile faster are not cached


def enable_compilation_cache(folder: Path) -> None:
    """Makes JAX cache compilation and autotuning results in a folder.

    Raises:
        InputError: If the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--compile-cache {folder}: {error.strerror or error}") from error
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)


def own_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder for this machine and these versions, within the user's cache folder."""
    home = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    device = jax.devices()[0]
    key_parts = (
        __version__,
        jax.__version__,
        device.client.platform_version,
        device.device_kind,
        str(len(jax.devices())),
        platform.machine(),
        processor(),
        environment.get("XLA_FLAGS", ""),
    )
    key = hashlib.sha256("\n".join(key_parts).encode()).hexdigest()[:16]
    return Path(home) / "jaxattn" / "compiled" / key
