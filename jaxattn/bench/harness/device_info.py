"""Facts about a run's device: the commit, the GPU, its driver, clocks and power."""

import subprocess
import sys
from pathlib import Path

QUERY = {
    "driver": "driver_version",
    "SM MHz": "clocks.sm",
    "memory MHz": "clocks.mem",
    "power W": "power.draw",
    "power limit W": "power.limit",
    "GPU C": "temperature.gpu",
}


def short_of_devices(program: str, asked: str, gpus: int) -> bool:
    """Returns whether JAX sees fewer devices than `asked` needs, and reports that on stderr."""
    import jax  # Here, because runs of the baselines query the GPU without JAX.

    seen = len(jax.devices())
    if seen < gpus:
        print(f"{program}: {asked} takes {gpus} devices, and JAX sees {seen}", file=sys.stderr)
    return seen < gpus


def commit() -> str:
    """The commit of this package's checkout, with "+" if files differ; "" outside a checkout."""
    folder = Path(__file__).parent
    number = _output(["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"])
    changed = _output(["git", "-C", str(folder), "status", "--porcelain", "-uno"])
    return f"{number}+" if number and changed else number


def card() -> dict[str, str]:
    """The state of the first GPU as nvidia-smi reports it now; empty without a GPU."""
    fields = ",".join(QUERY.values())
    said = _output(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-i0"])
    values = [value.strip() for value in said.split(",")]
    return dict(zip(QUERY, values, strict=True)) if len(values) == len(QUERY) else {}


def memory_used() -> dict[str, float]:
    """GB that all processes hold on the first GPU, from nvidia-smi; empty without a GPU."""
    query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i0"]
    said = _output(["nvidia-smi", *query])
    return {"held of the card": float(said) * 2**20 / 1e9} if said.isdecimal() else {}


def _output(command: list[str]) -> str:
    """The output of a command; "" if the command does not exist or fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""
