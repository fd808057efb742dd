#!/usr/bin/env bash
# On a CPU, jax.nn.scaled_dot_general with `mxfp8` gives NaN for each row that has a block of 32 zeros.
#
# Seen with jax 0.11.2 and 0.12.0.1. MXFP8 keeps one power of two for each 32 numbers of a row. A block of zeros gets
# the smallest one, 2**-127, which is a subnormal float32. XLA takes it for 0 on a CPU, and so the zeros are divided by
# 0. One such block makes the whole row of the result NaN: a row of padding, or half a row behind a ReLU. `nvfp4` gives
# 0 for the same row of padding. MXFP8 can hold a block of zeros under any scale.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PY'
import jax
import jax.numpy as jnp

rows = jnp.ones((3, 64)).at[1].set(0).at[2, :32].set(0)
contracted = ((2,), (2,)), ((0,), (0,))


def sums(mode, *scale):
    """The rows' products with a column of ones."""
    config = jax.nn.get_scaled_dot_general_config(mode, *scale)
    return jax.nn.scaled_dot_general(rows[None], jnp.ones((1, 1, 64)), contracted, configs=[config] * 3)[0, :, 0]


mxfp8 = sums("mxfp8")
nvfp4 = sums("nvfp4", jnp.ones(1))
quotient = jax.jit(jnp.divide)(jnp.float32(0), jnp.float32(2**-127))
print(f"jax {jax.__version__}: mxfp8 {mxfp8}, nvfp4 {nvfp4}, 0 / 2**-127 {quotient}")
assert mxfp8[0] == 64 and jnp.isnan(mxfp8).tolist() == [False, True, True], mxfp8
assert nvfp4[1] == 0 and jnp.isfinite(nvfp4).all(), nvfp4
assert jnp.isnan(quotient), quotient
PY
for version in 0.11.2 0.12.0.1; do
    python3 -m venv "$work/$version"
    "$work/$version/bin/pip" install -q "jax==$version" "jaxlib==$version"
    JAX_PLATFORMS=cpu "$work/$version/bin/python" "$work/look.py"
done
