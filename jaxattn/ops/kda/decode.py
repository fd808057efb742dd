"""Kimi's delta rule for a few new tokens per row, on a state pool."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.arena import Arena
from jaxattn.core.dispatch import Implementation
from jaxattn.core.validation.array_checks import floats
from jaxattn.ops.gdn.decode import check_gate_shapes, decode_rule
from jaxattn.ops.gdn.recurrent import _check_heads
from jaxattn.ops.kda.gates import check_lower_bound, kda_gates


def kda_decode(
    q: Float[Array, "B S Hk Dk"],
    k: Float[Array, "B S Hk Dk"],
    v: Float[Array, "B S Hv Dv"],
    f: Float[Array, "B S Hv Dk"],
    b: Float[Array, "B S Hv"],
    state: Float[Array, "*L Z Hv Dv Dk"],
    state_indices: Int[Array, " B"],
    *,
    A_log: Float[Array, " Hv"],
    dt_bias: Float[Array, "Hv Dk"],
    lower_bound: float | None = None,
    write_indices: Int[Array, " B"] | Int[Array, "B S"] | None = None,
    layer: int | Int[Array, ""] | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    arena: Arena | None = None,
    implementation: Implementation | None = None,
) -> tuple[Any, ...]:
    """Processes S more tokens of each row, and reads and writes the state in a pool.

    `jaxattn.kda.kimi_delta_attention_decode` fuses the recurrence with a layer's convolution, gates
    and gated norm. Use this op for models whose convolution, gates or norm differ.

    Args:
        q, k, v: Arrays of one dtype. The recurrence itself is float32.
        f, b, A_log, dt_bias, lower_bound: Inputs of `kda_gates`, of any floating dtype.
        state, state_indices, write_indices, layer, scale, use_qk_l2norm, arena,
            implementation: As in `jaxattn.gdn.gated_delta_rule_decode`.

    Returns:
        `(o, state)`, with an arena `(o, state, arena)`; o is `[B, S, Hv, Dv]` in v's dtype.

    Raises:
        TypeError: An argument is not an array, or has a wrong dtype.
        ValueError: A shape does not fit, or concrete slots repeat or lie outside the pool.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    op = "kda_decode"
    q, k, v, f, b = floats(op, q=q, k=k, v=v, f=f, b=b)
    A_log, dt_bias = floats(op, A_log=A_log, dt_bias=dt_bias)
    _check_heads(op, q, k, v, "S")
    heads, keys = v.shape[2], k.shape[3]
    check_gate_shapes(
        op, (("f", f, (*v.shape[:3], keys)), ("b", b, v.shape[:3]), ("A_log", A_log, (heads,)),
             ("dt_bias", dt_bias, (heads, keys))),
    )  # fmt: skip
    check_lower_bound(op, lower_bound)

    def gates() -> tuple[Array, Array]:
        return kda_gates(f, b, A_log, dt_bias, lower_bound=lower_bound)

    of_gates: dict[str, Any] = {"ba": b, "f": lax.collapse(f, 2), "lower_bound": lower_bound}

    def packed_gates() -> dict[str, Any]:
        weights = [x.astype(jnp.float32).reshape(-1) for x in (A_log, dt_bias)]
        return of_gates | {"weights": jnp.concatenate(weights)}

    return decode_rule(
        op,
        q,
        k,
        v,
        gates,
        state,
        state_indices,
        packed_gates,
        write_indices=write_indices,
        layer=layer,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        arena=arena,
        implementation=implementation,
    )
