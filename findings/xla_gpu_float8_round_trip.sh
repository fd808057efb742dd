#!/usr/bin/env bash
# XLA's GPU compiler removes a round trip through float8, so emulated quantization vanishes on a GPU.
#
# Seen with jax 0.11.2, compiled for a Hopper GPU's description, without the GPU. In one program,
# `x.astype(float8_e4m3fn).astype(float32)` becomes x, for e5m2 and the fnuz dtypes too. XLA for a CPU rounds: 1.1 becomes
# 1.125, and 1000 becomes NaN. So a forward pass with emulated float8 differs between the devices, and a test that packs
# and unpacks in one jitted function compares with numbers that were never rounded. Integers keep their conversion, and
# `lax.optimization_barrier` between both conversions keeps those of float8.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q jax==0.11.2 jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2 nvidia-cuda-nvcc==13.0.88
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

HOPPER = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978434048 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
"""
x = np.array([1.1, 1000.0], np.float32)


def round_trip(dtype, between=lambda x: x):
    return jax.jit(lambda x: between(x.astype(dtype)).astype(jnp.float32) * 3)


on_cpu = np.asarray(round_trip(jnp.float8_e4m3fn)(x) / 3)
print("CPU:", on_cpu)
np.testing.assert_array_equal(on_cpu, np.float32([1.125, np.nan]))

jax.devices()  # finds the plugin
topology = topologies.get_topology_desc("hopper", "cuda", target_config=HOPPER, topology="1x1x1")
where = NamedSharding(Mesh(topology.devices, ("x",)), PartitionSpec())
given = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def conversions(program):
    return program.lower(given).compile().as_text().count("convert(")


for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3b11fnuz, jnp.float8_e5m2fnuz):
    print("GPU,", jnp.dtype(dtype).name, "conversions:", conversions(round_trip(dtype)))
    assert conversions(round_trip(dtype)) == 0
assert conversions(round_trip(jnp.int8)) == 2
kept = conversions(round_trip(jnp.float8_e4m3fn, lax.optimization_barrier))
print("GPU, behind a barrier:", kept)
assert kept == 2
PY
