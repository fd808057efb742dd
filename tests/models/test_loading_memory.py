"""Loading takes a few blocks of host and device memory beside the parameters of any model."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from jaxattn.models import huggingface
from jaxattn.models.cutting import BLOCK_BYTES
from scripts.time_loading import write_folder

MIB = 2**20
READERS = 2
# Of the host, beside a block for each reader and one that is placed: XLA's pinned copies of blocks,
# whose pool doubles as it grows, and what compiling takes.
BESIDE = 320 * MIB


def loaded(folder: Path, platform: str, readers: int = READERS) -> dict[str, Any]:
    """What `scripts.time_loading` measures in a process of its own.

    JAX's allocator has its memory from the start, as it has by default: it keeps 8 bytes on the
    host for each 256 bytes of the device, whatever lies there.
    """
    command = [sys.executable, "-m", "scripts.time_loading", "load", str(folder)]
    result = subprocess.run(
        [*command, "--readers", str(readers)],
        env=os.environ | {"JAX_PLATFORMS": platform, "XLA_PYTHON_CLIENT_PREALLOCATE": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_the_host_holds_a_few_blocks(tmp_path):
    written = write_folder(tmp_path, 600 * MIB, sparse=True)
    found = loaded(tmp_path, "cpu", huggingface.READERS)
    assert found["parameter_bytes"] >= 0.99 * written > 540 * MIB
    # A block for each reader and one that is placed; the rest is what compiling takes.
    assert found["host_bytes_above_before"] <= (huggingface.READERS + 1) * BLOCK_BYTES + 64 * MIB


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["bfloat16", "fp8"])
def test_the_device_holds_the_parameters_and_less_than_a_gibibyte(tmp_path, weights):
    write_folder(tmp_path, 4000 * MIB, weights=weights, sparse=True)
    found = loaded(tmp_path, "cuda")
    assert found["device_bytes_above_parameters"] <= 1024 * MIB
    assert found["host_bytes_above_before"] <= (READERS + 1) * BLOCK_BYTES + BESIDE


@pytest.mark.gpu
@pytest.mark.large
def test_20_gigabytes_come_out_of_the_page_cache_at_3_per_second():
    memory = Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < 25e9:
        pytest.skip("needs 25 GB of room in /dev/shm")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        written = write_folder(Path(folder), 20 * 10**9)
        found = loaded(Path(folder), "cuda", huggingface.READERS)
    assert found["parameter_bytes"] >= 0.99 * written > 19e9
    assert found["device_bytes_above_parameters"] <= 1024 * MIB, found
    most = (huggingface.READERS + 1) * BLOCK_BYTES + BESIDE
    assert found["host_bytes_above_before"] <= most, found
    assert found["gigabytes_per_second"] >= 3, found
