"""Compiles kernels for a Hopper GPU without one, and prints registers, spills and shared memory.

    pip install jax-cuda13-plugin jax-cuda13-pjrt       # of JAX's own version; and CUDA's ptxas
    JAX_PLATFORMS=cpu python -m scripts.compiled OUT --only moe_sorted rms_norm

XLA compiles for a given topology, and Mosaic dumps the code of each launch. OUT then contains the
PTX, ptxas's remarks and the resources of each launch. A row of the table is a launch, named by its
kernel and its index in the case. The cases are those of scripts/cases.
"""

import argparse
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax._src.lib import xla_client
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scripts.cases import CASES
from scripts.lowered import HOPPER

# The device properties that XLA reads, here of an H100 SXM; an H200 differs only in its memory.
# Without the driver's version, XLA puts hardly any kernel into CUDA graphs.
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978434048 cuda_compute_capability { major: 9 }
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
DUMPS = ("PTX", "PTXAS")


def topology() -> Any:
    """The devices of a topology to compile for, which does not have to exist."""
    jax.devices()  # finds the plugin
    if not xla_client.pjrt_plugin_loaded("cuda"):
        raise SystemExit("scripts.compiled needs jax-cuda13-plugin and jax-cuda13-pjrt")
    if not xla_client.pjrt_plugin_initialized("cuda"):
        xla_client.initialize_pjrt_plugin("cuda")
    options = {"target_config": TARGET, "topology": "1x1x1"}
    api: Any = xla_client._xla
    return api.get_default_c_api_topology("cuda", "hopper", options)._make_compile_only_devices()


def compiled(op: Any, arguments: tuple[Any, ...]) -> Any:
    """The executable of an op for a Hopper GPU."""
    where = NamedSharding(Mesh(topology()[:1], ("x",)), PartitionSpec())

    def abstract(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    gpu: Any = {"default_backend": lambda: "gpu", "devices": lambda: [HOPPER]}
    abstracts = jax.tree.map(abstract, arguments)
    with mock.patch.multiple(jax, **gpu):
        lowered = jax.jit(op).trace(*abstracts).lower(lowering_platforms=("cuda",))
    return lowered.compile()


def rows(folder: Path) -> list[tuple[str, ...]]:
    """(launch, registers, spilled bytes, bytes of shared memory) of each dumped launch."""
    found: list[tuple[str, ...]] = []
    for remarks in sorted(folder.glob("*.ptxas")):
        said = remarks.read_text()
        resources = remarks.with_name(f"{remarks.stem}.resources.txt").read_text()
        first = lambda pattern, text: (re.findall(pattern, text) or ["?"])[0]  # noqa: E731
        found.append(
            (
                remarks.stem,
                first(r"Used (\d+) registers", said),
                first(r"(\d+) bytes spill stores", said),
                first(r"smem_scratch_bytes=(\d+)", resources),
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="a folder, made if there is none")
    names = [name for name in CASES if name != "out_of_bounds"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CASE")
    args = parser.parse_args()
    os.environ |= {f"MOSAIC_GPU_DUMP_{kind}": "1" for kind in DUMPS}
    print(f"{'launch':60}{'registers':>10}{'spilled':>10}{'shared':>10}")
    for name in args.only:
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)
        compiled(*CASES[name].launch())
        for launch, *numbers in rows(folder):
            print(f"{name + ' ' + launch:60}" + "".join(f"{x:>10}" for x in numbers), flush=True)


if __name__ == "__main__":
    main()
