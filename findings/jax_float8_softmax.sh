#!/usr/bin/env bash
# jax.nn.softmax of float8_e4m3fn is NaN for every input, and so are jax.ops.segment_max and segment_min.
#
# Seen with jax 0.11.2 and 0.12.0.1 on a CPU. All three begin a maximum or minimum with an infinity. float8_e4m3fn has
# none: the infinity becomes NaN, and so does the result. No warning follows. `jnp.max`, `jax.lax.cummax` and
# `jax.nn.logsumexp` know that the type is finite and are right, and float8_e5m2 is right throughout. `jnp.max` with
# `where` demands an `initial`, and gives NaN as well with -inf, which should be neutral.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PY'
import jax
import jax.numpy as jnp

segments = jnp.array([0, 0, 1, 1])


def results(dtype):
    x = jnp.array([1, 2, 4, 0.5]).astype(dtype)
    found = {
        "softmax": jax.nn.softmax(x),
        "segment_max": jax.ops.segment_max(x, segments, 2),
        "segment_min": jax.ops.segment_min(x, segments, 2),
        "max of all": jnp.max(x, where=x > 0, initial=-jnp.inf),
        "max": jnp.max(x),
        "cummax": jax.lax.cummax(x),
        "logsumexp": jax.nn.logsumexp(x),
        "segment_sum": jax.ops.segment_sum(x, segments, 2),
    }
    return {name: each.astype(jnp.float32).tolist() for name, each in found.items()}


print("jax", jax.__version__)
narrow, wide = results(jnp.float8_e4m3fn), results(jnp.float8_e5m2)
for name in narrow:
    print(f"{name}: float8_e4m3fn {narrow[name]}, float8_e5m2 {wide[name]}")
lost = [name for name, each in narrow.items() if jnp.isnan(jnp.array(each)).all()]
assert lost == ["softmax", "segment_max", "segment_min", "max of all"], lost
assert narrow["max"] == wide["max"] == wide["max of all"] == 4
assert narrow["cummax"] == [1, 2, 4, 4] and wide["segment_max"] == [2, 4] and wide["segment_min"] == [1, 0.5]
assert not any(jnp.isnan(jnp.array(each)).any() for each in wide.values()), wide
PY
for version in 0.11.2 0.12.0.1; do
    python3 -m venv "$work/$version"
    "$work/$version/bin/pip" install -q "jax==$version" "jaxlib==$version"
    JAX_PLATFORMS=cpu "$work/$version/bin/python" "$work/look.py"
done
