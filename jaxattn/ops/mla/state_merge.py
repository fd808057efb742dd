"""The merge of attention results over disjoint keys: chunks of a prompt, shards of a context."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxattn.core.validation.array_checks import FLOATS


@jax.named_scope("merge_attention_states")
def merge_attention_states(
    outs: Sequence[Float[Array, "*rows V"]] | Float[Array, "K *rows V"],
    lses: Sequence[Float[Array, "*rows"]] | Float[Array, "K *rows"],
) -> tuple[Float[Array, "*rows V"], Float[Array, "*rows"]]:
    """Merges K >= 1 attention results over disjoint keys by their log-sum-exp (natural logarithm).

    A part whose lse is -inf saw no key, so its `out` is ignored, whatever it holds. The same holds
    for +inf, with which FlashAttention and FlashMLA mark such a part. If no part saw any key, the
    result is 0 and -inf. An lse of NaN gives NaN. Merging merged results equals merging all parts,
    up to rounding.

    Args:
        outs: The parts' outputs, K arrays or one stack of them, of any floating dtype.
        lses: The parts' log-sum-exps, shaped as `outs` without the last axis.

    Returns:
        `out` in the parts' dtype and `lse` in float32 (float64 if a part is). The computation uses
        the latter dtype and is differentiable.

    Raises:
        TypeError: An argument is not a floating array.
        ValueError: There are no parts, or their shapes do not fit.
    """
    for name, parts in (("outs", outs), ("lses", lses)):
        if not hasattr(parts, "shape") and not isinstance(parts, Sequence):
            raise TypeError(
                f"merge_attention_states: {name} must be a sequence of arrays or one stack of "
                f"them, got {type(parts).__name__}"
            )
        for i, part in enumerate([parts] if hasattr(parts, "shape") else parts):
            found = str(getattr(part, "dtype", type(part).__name__))
            if found not in FLOATS:
                if hasattr(part, "shape"):
                    found = f"{found} {tuple(part.shape)}"
                title = name if hasattr(parts, "shape") else f"{name}[{i}]"
                raise TypeError(
                    f"merge_attention_states: {title} must be an array of {' or '.join(FLOATS)}, "
                    f"got {found}"
                )
    out_shapes, lse_shapes = _shapes(outs), _shapes(lses)
    if not out_shapes or len(out_shapes) != len(lse_shapes):
        raise ValueError(
            f"merge_attention_states: needs as many outs as lses and at least one, got "
            f"{len(out_shapes)} and {len(lse_shapes)}"
        )
    shapes = list(zip(out_shapes, lse_shapes, strict=True))
    if any(not out or out[:-1] != lse or out != shapes[0][0] for out, lse in shapes):
        raise ValueError(
            "merge_attention_states: every lse must have the shape of its out without the last "
            f"axis, and all outs the same shape, got (out, lse) {shapes}"
        )
    dtype = jnp.result_type(*([outs] if hasattr(outs, "shape") else outs))
    wide = jnp.promote_types(dtype, jnp.float32)
    parts, lse = jnp.asarray(_stack(outs), wide), jnp.asarray(_stack(lses), wide)
    lse = jnp.where(lse == jnp.inf, -jnp.inf, lse)
    parts = jnp.where((lse == -jnp.inf)[..., None], 0, parts)
    # The result does not depend on the shift, so no gradient goes through it. Rows that saw no key
    # shift by 0, because -inf - -inf is NaN.
    top = lax.stop_gradient(lse.max(0))
    empty = top == -jnp.inf
    shift = jnp.where(empty, 0, top)
    weight = jnp.exp(lse - shift)
    total = jnp.where(empty, 1, weight.sum(0))
    out = (parts * weight[..., None]).sum(0) / total[..., None]
    return out.astype(dtype), jnp.where(empty, -jnp.inf, shift + jnp.log(total))


def _shapes(parts: Any) -> list[tuple[int, ...]]:
    if hasattr(parts, "shape"):
        return [tuple(parts.shape[1:])] * (parts.shape[0] if parts.shape else 0)
    return [tuple(part.shape) for part in parts]


def _stack(parts: Any) -> Any:
    return parts if hasattr(parts, "shape") else jnp.stack([*parts])


def merge_by_all_to_all(
    out: Float[Array, "B 1 H R"], lse: Float[Array, "B 1 H"], axes: tuple[str, ...]
) -> Float[Array, "B 1 h R"]:
    """Returns the merged output of this GPU's heads, exchanged in at least float32."""
    wide = jnp.promote_types(out.dtype, jnp.float32)
    joined = jnp.concatenate([out.astype(wide), lse.astype(wide)[..., None]], axis=-1)
    gpus, (rows, _, heads, width) = lax.axis_size(axes), joined.shape
    joined = joined.reshape(rows, 1, gpus, heads // gpus, width)
    met = lax.all_to_all(joined, axes, split_axis=2, concat_axis=0)
    met = met.reshape(gpus, rows, 1, heads // gpus, width)
    merged, _ = merge_attention_states(met[..., :-1], met[..., -1])
    return merged.astype(out.dtype)
