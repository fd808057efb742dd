#!/usr/bin/env bash
# A Mosaic GPU kernel cannot store a constant array of 64 elements: only 1 element or multiples of 128 lower.
#
# Seen with jax 0.11.2 and 0.12.0.1, lowered for CUDA on a CPU. `ref[...] = jnp.full((64,), 0.0)` raises a
# NotImplementedError, and copying 64 elements from one reference to another a ValueError about layouts, which does not
# mention the size. Both fail for 192 elements as well, and lower for 128 and 256. A reference to one row of 64 elements
# can therefore not be cleared or copied on its own, as with a head dimension of 64.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PY'
import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def lowered(store, size):
    def kernel(x_ref, out_ref):
        out_ref[...] = store(x_ref)

    shape = jax.ShapeDtypeStruct((size,), jnp.float32)
    launch = plgpu.kernel(kernel, out_type=shape, grid=(1,), grid_names=("i",))
    try:
        jax.jit(launch).trace(shape).lower(lowering_platforms=("cuda",))
    except (NotImplementedError, ValueError) as error:
        return type(error).__name__
    return "lowers"


stores = {"constant": lambda x_ref: jnp.full(x_ref.shape, 0.0), "copy": lambda x_ref: x_ref[...]}
for name, store in stores.items():
    found = {size: lowered(store, size) for size in (64, 128, 192, 256)}
    print(jax.__version__, name, found)
    fails = "NotImplementedError" if name == "constant" else "ValueError"
    assert found == {64: fails, 128: "lowers", 192: fails, 256: "lowers"}, found
PY
for version in 0.11.2 0.12.0.1; do
    python3 -m venv "$work/$version"
    "$work/$version/bin/pip" install -q "jax==$version" "jaxlib==$version"
    JAX_PLATFORMS=cpu "$work/$version/bin/python" "$work/look.py"
done
