#!/usr/bin/env bash
# On a CPU, jax.lax.ragged_dot multiplies every row with the matrices of all groups, and copies the rows for each group.
#
# Seen with jax 0.11.2. Each of 256 rows belongs to one group, so the work should not depend on the number of groups.
# XLA's cost analysis counts G times the floating-point operations for G groups: it widens the rows to
# [rows, G * depth], fills what belongs to other groups with zeros, and runs one dense product. The temporary memory
# grows with G, too. A CPU test of a mixture of experts thus pays for every expert, also for those without a row.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q jax==0.11.2 jaxlib==0.11.2
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp

rows, depth, columns = 256, 64, 32


def cost(groups):
    shapes = ((rows, depth), jnp.float32), ((groups, depth, columns), jnp.float32), ((groups,), jnp.int32)
    compiled = jax.jit(jax.lax.ragged_dot).lower(*(jax.ShapeDtypeStruct(*s) for s in shapes)).compile()
    wide = f"f32[{rows},{groups * depth}]" in compiled.as_text()
    return compiled.cost_analysis()["flops"], compiled.memory_analysis().temp_size_in_bytes, wide


of_the_rows = 2 * rows * depth * columns
for groups in (4, 16):
    flops, temporary, wide = cost(groups)
    print(f"{groups} groups: {flops / of_the_rows:.2f} times the work of the rows, {temporary} temporary bytes")
    assert groups <= flops / of_the_rows < 1.1 * groups, flops
    assert wide and temporary >= groups * rows * depth * 4, temporary
PY
