"""The check that JAX sees as many devices as a bench needs."""

import sys

import jax


def short_of_devices(program: str, asked: str, gpus: int) -> bool:
    """Returns whether JAX sees fewer devices than `asked` needs, and reports that on stderr."""
    seen = len(jax.devices())
    if seen < gpus:
        print(f"{program}: {asked} needs {gpus} devices, but JAX found {seen}", file=sys.stderr)
    return seen < gpus
