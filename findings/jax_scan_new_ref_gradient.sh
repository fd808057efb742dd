#!/usr/bin/env bash
# The gradient of a `lax.scan` is silently wrong if its body writes to a `jax.new_ref` of constants.
#
# Seen with jax 0.11.2 and 0.12.0.1 on a CPU. The body makes a reference of zeros, writes the square of the carry to it
# and freezes it. Its own gradient at 1 is 2, as it should be. Three steps of a scan compute x**8, whose gradient at 1
# is 8, but `jax.grad` gives 0. Under 0.11.2 that is so without `jax.jit`, and with it a ValueError about
# JaxprInputEffect is raised. 0.12.0.1 gives 0 with `jax.jit`. A reference that starts as the carry gives 8.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PY'
import jax
import jax.numpy as jnp


def square(x, start):
    ref = jax.new_ref(start)
    ref[...] = x * x
    return jax.freeze(ref)


def from_zeros(x):
    return square(x, jnp.zeros(2))


def from_carry(x):
    return square(x, x)


def gradient(body, under_jit):
    def total(x):
        return jax.lax.scan(lambda carry, _: (body(carry), None), x, length=3)[0].sum()

    differentiated = jax.grad(total)
    try:
        return (jax.jit(differentiated) if under_jit else differentiated)(jnp.ones(2)).tolist()
    except ValueError as error:
        return str(error)[:18]


old = jax.__version__ == "0.11.2"
alone = jax.grad(lambda x: from_zeros(x).sum())(jnp.ones(2)).tolist()
scans = {"from zeros, jit": gradient(from_zeros, True), "from the carry, jit": gradient(from_carry, True)}
if old:
    scans["from zeros, no jit"] = gradient(from_zeros, False)
print(jax.__version__, "one step:", alone, "scan:", scans)
assert alone == [2, 2], alone
assert scans["from the carry, jit"] == [8, 8]
assert scans["from zeros, jit"] == ("`JaxprInputEffect`" if old else [0, 0])
assert scans.get("from zeros, no jit", [0, 0]) == [0, 0]
PY
for version in 0.11.2 0.12.0.1; do
    python3 -m venv "$work/$version"
    "$work/$version/bin/pip" install -q "jax==$version" "jaxlib==$version"
    JAX_PLATFORMS=cpu "$work/$version/bin/python" "$work/look.py"
done
