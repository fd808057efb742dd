#!/usr/bin/env bash
# pip installs tokamax with a JAX under which its Mosaic GPU kernels cannot be traced.
#
# Seen with tokamax 0.0.12 and jax 0.11.2, traced on a CPU. tokamax asks for jax>=0.9.2 without an upper bound, and its
# kernels call `plgpu.kernel(out_shape=...)`. The argument is called `out_type` in jax 0.11.2. The old name is not
# rejected by `plgpu.kernel` itself but reaches a class through `**mesh_kwargs`: the TypeError names `Mesh.__init__`.
# Importing tokamax works, so the fault appears only when a kernel is called.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q tokamax==0.0.12 jax==0.11.2 jaxlib==0.11.2
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY'
import importlib.metadata

import jax
import jax.numpy as jnp
from tokamax._src.ops.ragged_dot import pallas_mosaic_gpu_common as common
from tokamax._src.ops.ragged_dot import pallas_mosaic_gpu_kernel_sm90 as sm90

config = common.Config(block_m=64, block_n=64, block_k=64, num_stages=2, split_k=1)
rows = jax.ShapeDtypeStruct((128, 64), jnp.bfloat16)
sizes = jax.ShapeDtypeStruct((2,), jnp.int32)


def weights_gradient(lhs, rhs, group_sizes):
    return sm90.ragged_contracting_dim_dot_kernel(lhs, rhs, group_sizes, jnp.dtype(jnp.bfloat16), config)


asked = [each for each in importlib.metadata.requires("tokamax") if each.startswith("jax>")]
try:
    found = str(jax.eval_shape(weights_gradient, rows, rows, sizes))
except TypeError as error:
    found = str(error)
print(asked, found)
assert asked == ["jax>=0.9.2"], asked
assert "Mesh.__init__" in found and "'out_shape'" in found, found
PY
