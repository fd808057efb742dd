"""The check that JAX sees as many devices as a bench needs."""

import sys

import jax


def short_of_devices(program: str, option: str, gpus: int) -> bool:
    """Returns whether JAX sees fewer devices than `option` needs, and reports that on stderr."""
    num_devices = len(jax.devices())
    if num_devices < gpus:
        print(
            f"{program}: {option} needs {gpus} devices, but JAX found {num_devices}",
            file=sys.stderr,
        )
    return num_devices < gpus
