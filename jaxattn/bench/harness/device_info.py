"""Facts about a run's device: the GPU, its driver, clocks and power."""

import platform
import subprocess

QUERY = {
    "driver": "driver_version",
    "SM MHz": "clocks.sm",
    "memory MHz": "clocks.mem",
    "power W": "power.draw",
    "power limit W": "power.limit",
    "GPU C": "temperature.gpu",
}


def device_facts() -> dict[str, str]:
    import jax  # Here, because runs of the baselines query the GPU without JAX.

    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "runtime": device.client.platform_version.splitlines()[0],
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def card() -> dict[str, str]:
    """The state of the first GPU as nvidia-smi reports it now; empty without a GPU."""
    fields = ",".join(QUERY.values())
    said = output_of(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-i0"]
    )
    values = [value.strip() for value in said.split(",")]
    return dict(zip(QUERY, values, strict=True)) if len(values) == len(QUERY) else {}


def memory_used() -> dict[str, float]:
    """GB that all processes hold on the first GPU, from nvidia-smi; empty without a GPU."""
    query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i0"]
    said = output_of(["nvidia-smi", *query])
    return {"held of the card": float(said) * 2**20 / 1e9} if said.isdecimal() else {}


def output_of(command: list[str]) -> str:
    """The output of a command; "" if the command does not exist or fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""
