#!/usr/bin/env bash
# Two programs that launch the same Mosaic GPU kernel hold it under different hashes, so it is compiled twice.
#
# Seen with jax 0.11.2, and no more with 0.12.0.1. A Pallas kernel's module gets the attribute
# `mosaic_gpu.dump_basename`: the kernel's name and a counter of the process, such as copy_0 and copy_1. The attribute is
# part of the bytes that are hashed into `kernel_hash`, by which the runtime finds kernels that it has compiled. The
# counter is the only difference between the modules. An engine with 50 executables therefore compiles each of their
# common kernels up to 50 times.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q jax==0.11.2
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

shape = jax.ShapeDtypeStruct((128,), jnp.float32)


def copy(x_ref, out_ref):
    out_ref[...] = x_ref[...]


def kernel_of(program):
    """(hash, module) of a program's kernel, lowered for a GPU."""
    lowered = jax.jit(program).trace(shape).lower(lowering_platforms=("cuda",))
    found = []

    def look(operation):
        if "mhlo.backend_config" in operation.attributes:
            config = {each.name: each.attr for each in operation.attributes["mhlo.backend_config"]}
            names = ("kernel_hash", "module")
            found.append([ir.StringAttr(config[name]).value_bytes for name in names])
        return ir.WalkResult.ADVANCE

    module = lowered.compiler_ir("stablehlo")
    with module.context:
        module.operation.walk(look, ir.WalkOrder.PRE_ORDER)
    return found[0]


launch = plgpu.kernel(copy, out_type=shape, grid=(1,), grid_names=("i",))
(first_hash, first), (second_hash, second) = (
    kernel_of(lambda x: launch(x) + 1),
    kernel_of(lambda x: launch(x) + 2),
)
print("same hash:", first_hash == second_hash)
print("same but for the counter:", first == second.replace(b"copy_1", b"copy_0"))
assert first_hash != second_hash and first != second
assert first == second.replace(b"copy_1", b"copy_0")
PY
