#!/usr/bin/env bash
# A function that jax.export has serialized gives results of another type: `deserialize` forgets weak types.
#
# Seen with jax 0.11.2 and flatbuffers 25.12.19 on a CPU. A Python number makes a weakly typed array, which takes the
# type of a bfloat16 array beside it. The `Exported` of such a function returns a weakly typed array, too, and the same
# object after `serialize` and `deserialize` a float32 one: a sum with bfloat16 is bfloat16 before and float32 after.
# `in_avals` and `out_avals` of both are unequal. Those with a symbolic dimension are unequal as well, though they print
# the same.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q jax==0.11.2 jaxlib==0.11.2 flatbuffers==25.12.19
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
from jax import export

doubled = jax.jit(lambda scale: scale * 2)
before = export.export(doubled)(0.5)
after = export.deserialize(before.serialize())
row = jnp.ones((4,), jnp.bfloat16)
types = [str((row + call(0.5)).dtype) for call in (doubled, before.call, after.call)]
print("row + jit, row + exported, row + deserialized:", types)
assert types == ["bfloat16", "bfloat16", "float32"], types
for name in ("in_avals", "out_avals"):
    print(name, getattr(before, name), getattr(after, name))
    assert getattr(before, name)[0].weak_type and not getattr(after, name)[0].weak_type, name

before = export.export(doubled)(jax.ShapeDtypeStruct(export.symbolic_shape("rows, 4"), jnp.float32))
after = export.deserialize(before.serialize())
print(before.in_avals, after.in_avals, before.in_avals == after.in_avals)
assert str(before.in_avals) == str(after.in_avals), after.in_avals
assert before.in_avals != after.in_avals, after.in_avals
PY
