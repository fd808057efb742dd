#!/usr/bin/env bash
# On a CPU, XLA widens a whole float8 array to float16 in order to write a few rows of it in place.
#
# Seen with jax 0.11.2. A donated int8 array of 64 MiB is updated in place by `.at[rows].set`, with 16 bytes of
# temporary memory. The same update of a float8_e4m3fn array converts all of it to float16 and back: 128 MiB of
# temporary memory and 64 MiB of traffic per call, however few rows are written. A cache of keys and values in float8
# therefore gets slower the larger it is. A cache of int8 bits with `lax.bitcast_convert_type` of the rows does not.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q jax==0.11.2
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp

size = 2**20


def temporary(dtype):
    def write(cache, rows, values):
        return cache.at[rows].set(values)

    shapes = ((size, 64), dtype), ((4,), jnp.int32), ((4, 64), dtype)
    lowered = jax.jit(write, donate_argnums=0).lower(*(jax.ShapeDtypeStruct(*s) for s in shapes))
    compiled = lowered.compile()
    return compiled.memory_analysis().temp_size_in_bytes, f"f16[{size},64]" in compiled.as_text()


for dtype in (jnp.int8, jnp.float8_e4m3fn):
    print(dtype.__name__, temporary(dtype))
assert temporary(jnp.int8)[0] < 1024 and not temporary(jnp.int8)[1]
assert temporary(jnp.float8_e4m3fn)[0] >= 2 * size * 64 and temporary(jnp.float8_e4m3fn)[1]
PY
