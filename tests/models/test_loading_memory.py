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

from jaxattn.models.loading.weight_loader import PART_BYTES, READERS
from scripts.time_loading import write_folder

MIB = 2**20
FEW = 4


def loaded(folder: Path, platform: str, readers: int) -> dict[str, Any]:
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


@pytest.mark.slow(reason="blocks that pile up; found by the same test of a device on a GPU too")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("readers", [FEW, READERS])
def test_the_host_holds_a_part_for_each_reader(tmp_path, readers):
    written = write_folder(tmp_path, 600 * MIB, sparse=True)
    found = loaded(tmp_path, "cpu", readers)
    assert found["parameter_bytes"] >= 0.99 * written > 540 * MIB
    assert found["host_bytes_above_before"] <= readers * PART_BYTES, found


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["bfloat16", "fp8"])
def test_the_device_holds_the_parameters_and_less_than_a_gibibyte(tmp_path, weights):
    write_folder(tmp_path, 4000 * MIB, weights=weights, sparse=True)
    found = loaded(tmp_path, "cuda", FEW)
    assert found["device_bytes_above_parameters"] <= 1024 * MIB
    assert found["host_bytes_above_before"] <= FEW * PART_BYTES, found


@pytest.mark.gpu
@pytest.mark.large
def test_20_gigabytes_come_out_of_the_page_cache_at_3_per_second():
    memory = Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < 25e9:
        pytest.skip("needs 25 GB of room in /dev/shm")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        written = write_folder(Path(folder), 20 * 10**9)
        found = loaded(Path(folder), "cuda", READERS)
    assert found["parameter_bytes"] >= 0.99 * written > 19e9
    assert found["device_bytes_above_parameters"] <= 1024 * MIB, found
    assert found["host_bytes_above_before"] <= READERS * PART_BYTES, found
    assert found["gigabytes_per_second"] >= 3, found
