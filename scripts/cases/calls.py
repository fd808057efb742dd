"""The functions that cases call, by the names of their ops.

A case calls an op with arrays by name, the case's options and `implementation`. If an argument
depends on others, such as a schedule or the angles of positions, a function here computes it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn import gdn, gqa, mla, moe
from jaxattn.arena import Arena
from jaxattn.core.layer_index import LayerIndex
from jaxattn.core.numerics.rope import RopeConfig, Rotation, rotation
from jaxattn.kernels.hopper.reduce.rms_norm_prologue import RmsNormPrologueParams
from jaxattn.kernels.linear.fp8_linear import linears_fp8_mosaic
from jaxattn.mla import LatentFormat
from jaxattn.ops.gdn.gated_norm import gated_norm_of_sequences
from jaxattn.ops.gdn.packed_conv1d import causal_conv1d_of_pieces, causal_conv1d_of_segments
from jaxattn.ops.linear import linear
from jaxattn.ops.linear.norm_linear import PendingNorm
from jaxattn.ops.moe.router_shared_experts import router_shared_experts


def in_pattern(op: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an op so that `pattern`, (period, offset), makes its layer a `LayerIndex`."""

    def call(*arrays: Any, pattern: tuple[int, int] | None = None, **given: Any) -> Any:
        if pattern is not None:
            given["layer"] = LayerIndex(given["layer"], *pattern)
        return op(*arrays, **given)

    return call


def mla_decode(
    *, invariant: bool = False, packed: str | None = None, kv_cache: Any, **given: Any
) -> Any:
    """With the batch-invariant schedule, or over a cache that is packed first."""
    q, tables = given["q"], given["block_tables"]
    if invariant:
        shape: Any = {"q_len": q.shape[1], "num_heads": q.shape[2], "max_pages": tables.shape[1]}
        lens = given["seq_lens"]
        given["schedule"] = mla.decode_schedule(lens, batch_invariant=True, **shape)
    if packed:
        kv_cache = LatentFormat(packed).pack(kv_cache, given["kv_scale"])
    return mla.mla_decode(kv_cache=kv_cache, **given)


def mla_sparse(*, q: Any, packed: str | None = None, kv_cache: Any, **given: Any) -> Any:
    """Decode for up to 8 tokens per row, else prefill; `packed` packs the cache first."""
    if packed:
        kv_cache = LatentFormat(packed).pack(kv_cache)
    op = mla.mla_sparse_decode if q.shape[1] <= 8 else mla.mla_sparse_prefill
    return op(q=q, kv_cache=kv_cache, **given)


def delta_rule_gradient(op: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients of a chunked rule's outputs and states with respect to all its floats."""

    def call(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, **given: Any) -> Any:
        def total(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any) -> Any:
            out, states = op(q, k, v, g, beta, initial_state=initial_state, **given)
            return jnp.square(out.astype(jnp.float32)).sum() + jnp.square(states).sum()

        return jax.grad(total, argnums=range(6))(q, k, v, g, beta, initial_state)

    return call


def convolution_gradient(x: Any, weight: Any, first: Any) -> Any:
    """Gradients of a convolution of sequences with SiLU, as in the training of a delta layer."""

    def total(x: Any, weight: Any) -> Any:
        (y,) = causal_conv1d_of_segments(x, weight, first, x.shape[-1:])
        return jnp.square(y.astype(jnp.float32)).sum()

    return jax.grad(total, argnums=(0, 1))(x, weight)


def convolution_of_pieces(
    x: Any, weight: Any, initial_state: Any, position: Any, sequence: Any, implementation: Any
) -> Any:
    """A convolution of sequences with SiLU, as in a chunk of rows' prompts."""

    def reference() -> Any:
        flat, place, row = x.reshape(-1, x.shape[-1]), position.reshape(-1), sequence.reshape(-1)
        width, token, total = weight.shape[1], jnp.arange(len(flat)), 0.0
        for back in range(width):
            own = flat[jnp.maximum(token - back, 0), : len(weight)]
            before = initial_state[row, jnp.clip(width - 1 + place - back, 0, width - 2)]
            inputs = jnp.where((place >= back)[:, None], own, before).astype(jnp.float32)
            total += inputs * weight[:, width - 1 - back]
        return (jax.nn.silu(total).astype(x.dtype).reshape(*x.shape[:-1], -1),)

    return causal_conv1d_of_pieces(
        x,
        weight,
        initial_state,
        position,
        sequence,
        (len(weight),),
        reference,
        implementation=implementation,
    )


def gated_norm_gradient(o: Any, projection: Any, weight: Any, **options: Any) -> Any:
    """Gradients of a delta layer's gated norm, whose gate is the end of a projection."""
    columns = o.shape[-2] * o.shape[-1]

    def total(o: Any, projection: Any, weight: Any) -> Any:
        gate = projection[..., -columns:]
        y = gated_norm_of_sequences(o, gate, weight, eps=1e-6, projection=projection, **options)
        return jnp.square(y.astype(jnp.float32)).sum()

    return jax.grad(total, argnums=(0, 1, 2))(o, projection, weight)


def attention_gradient(op: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients of the outputs and the LSE with respect to all floats."""

    def call(*, implementation: Any, lengths: Any = None, **given: Any) -> Any:
        static = {
            name: given.pop(name) for name in ("scale", "window", "soft_cap") if name in given
        }

        def total(floats: Any) -> Any:
            out, lse = op(**floats, **static, lengths=lengths, implementation=implementation)
            seen = jnp.where(jnp.isfinite(lse), lse, 0)
            return jnp.square(out.astype(jnp.float32)).sum() + seen.sum()

        return tuple(jax.grad(total)(given).values())

    return call


def append_of(op: Callable[..., Any]) -> Callable[..., Any]:
    """An append op; without `rotation`, for `positions` or two tokens from each row's length."""

    def call(*, config: RopeConfig, positions: Any = None, **given: Any) -> Any:
        if "rotation" not in given:
            if positions is None:
                positions = given["seq_lens"][:, None] + jnp.arange(2)
            given["rotation"] = rotation(positions, config)
        return op(config=config, **given)

    return call


def gqa_append_and_decode(
    *, q: Any, k: Any, v: Any, kv_cache: Any, block_tables: Any, seq_lens: Any, sinks: Any = None,
    window: int | None = None, config: RopeConfig, gated: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """Caches a chunk of each row and attends to the cache, then again for its last two tokens."""
    append: Any = gqa.turbo_append if "form" in options else gqa.gqa_append
    attend: Any = gqa.turbo_attention if "form" in options else gqa.gqa_decode
    new, paged = q.shape[1], (block_tables, seq_lens)
    angles = rotation(jnp.maximum(seq_lens - new, 0)[:, None] + jnp.arange(new), config)
    queries, cache = append(
        q, k, v, None, kv_cache, *paged, rotation=angles, config=config, **options
    )
    more = options | {"window": window, "sinks": sinks}
    if "form" in options:
        chunk = attend(queries, cache, *paged, **more)
    else:
        chunk = gqa.gqa_prefill(queries, k, v, cache, *paged, jnp.minimum(seq_lens, new), **more)
    gate = q[:, -2:] if gated else None
    return attend(queries[:, -2:], cache, *paged, gate=gate, **more), chunk


def delta_rule_prefill(op: Callable[..., Any]) -> Callable[..., Any]:
    """With checkpoints every `tokens` tokens, and a norm of the output."""

    def call(
        *, checkpoints: Any = None, tokens: int = 0, gate: Any = None, weight: Any = None,
        **given: Any,
    ) -> Any:  # fmt: skip
        kept = None if checkpoints is None else gdn.Checkpoints(slots=checkpoints, tokens=tokens)
        norm = None if gate is None else gdn.OutputNorm(gate=gate, weight=weight)
        return op(checkpoints=kept, output_norm=norm, **given)

    return call


def gated_delta_net_decode(
    *, arena: bool = False, pattern: tuple[int, int] | None = None, **given: Any
) -> Any:
    """With its output in an arena, if `arena` is set."""
    batch, q_len, gates = given["ba"].shape
    if arena:
        scratch = gdn.scratch(batch=batch, q_len=q_len, num_v_heads=gates // 2)
        given["arena"] = Arena.allocate(scratch)
    return in_pattern(gdn.gated_delta_net_decode)(pattern=pattern, **given)


def bare_decode(
    q: Any, k: Any, v: Any, a: Any, b: Any, state: Any, state_indices: Any, A_log: Any,
    dt_bias: Any, **options: Any,
) -> Any:  # fmt: skip
    options |= {"A_log": A_log, "dt_bias": dt_bias, "use_qk_l2norm": False}
    return gdn.gated_delta_rule_decode(q, k, v, a, b, state, state_indices, **options)


def gradient_of_experts(*, ids: Any, layer: int, implementation: Any, **given: Any) -> Any:
    """Gradients of the sum of all outputs with respect to all floats."""
    activation = given.pop("activation", None)

    def total(floats: Any) -> Any:
        return moe.mixture_of_experts(
            **floats, ids=ids, layer=layer, activation=activation, implementation=implementation
        ).sum()

    return tuple(jax.grad(total)(given).values())


def shared_experts_and_mixture(
    *, x: Any, halves: Any, bias: Any = None, gate_up: Any, down: Any, valid: Any, always: int,
    router: moe.Router, implementation: Any,
) -> Any:  # fmt: skip
    """A token's router, choice and shared experts, followed by its other experts."""
    with jax.ensure_compile_time_eval():
        layer = LayerIndex(jnp.int32(1), 2, 1)
    spec = moe.scratch(
        tokens=1, top_k=router.top_k + always, experts=gate_up.shape[1], hidden=x.shape[1],
        expert_size=down.shape[-1],
    )  # fmt: skip
    more: Any = {"layer": layer, "implementation": implementation}
    ids, weights, listed, arena = router_shared_experts(
        x, halves, bias, gate_up, router, always=always, valid=valid,
        arena=Arena.allocate(spec), **more,
    )  # fmt: skip
    return moe.mixture_of_experts(
        x, ids, weights, gate_up, down, arena=arena, listed=listed, **more
    )[0]


def normed_linears(
    *, stream: Any, added: Any, norms: Any, layer: Any, weights: Any, **options: Any
) -> Any:
    """A token's residual sum, its norm, and the products that read the norm, in one launch."""
    place = LayerIndex(layer, 2, 1)
    token = PendingNorm(stream, added, norms, layer=place, eps=1e-6, dtype=jnp.bfloat16, **options)
    assert token.serves(weights, place)
    return token.linears(weights, layer=place, out_dtypes=[jnp.bfloat16] * len(weights))


def normed_fp8_linears(
    *, stream: Any, added: Any, norms: Any, layer: Any, weights: Any, scales: Any
) -> Any:
    """Like `linear_fp8_layer`, with a norm before the products."""
    norm = RmsNormPrologueParams(added=added, weights=norms, affine=(2, 1), eps=1e-6)
    out = [jnp.bfloat16] * len(weights)
    return linears_fp8_mosaic(stream, weights, scales, layer=layer, out_dtypes=out, norm=norm)


def heads_layer(*, angles: Any = None, **given: Any) -> Any:
    """With rotated dims after those that are multiplied, if there are angles."""
    config = RopeConfig(dim=64, interleaved=True)
    turned = None if angles is None else (Rotation(angles), config)
    return linear.heads_layer(rotary=turned, **given)
