"""The gradient of the chunked delta rules where a kernel ran forward, by kernels.

Where channels have decays of their own, the kernels make the states of the chunks and their
gradients, which is all that goes from chunk to chunk; XLA differentiates each chunk alone.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.core.dispatch import PACKAGE
from jaxattn.core.numerics.matmul import matmul
from jaxattn.kernels.gdn.backward.launch import (
    ChunkedTokens,
    DeltaRuleBackwardCall,
    channel_states,
    gdn_backward_mosaic,
)
from jaxattn.kernels.gdn.prefill.tiles import CHUNK
from jaxattn.ops.gdn.chunk_xla import LOWEST_LOG_DECAY, l2norm, pack
from jaxattn.ops.gdn.delta_rule import DeltaRule


def chunk_gradient(
    op: str,
    rule: DeltaRule,
    tokens: tuple[jax.Array, ...],
    initial_state: jax.Array | None,
    cu_seqlens: Any,
    cotangents: tuple[jax.Array, jax.Array],
    *,
    scale: float,
    use_qk_l2norm: bool,
    interpret: bool,
) -> tuple[Any, ...]:
    """Gradients of q, k, v, g, beta and the initial state, by kernels.

    Args:
        op: the public name, for messages.
        tokens: q, k, v [B, T, H, 128], g and beta [B, T, Hv].
        cu_seqlens: a traced array, NumPy's, or None.
        cotangents: of o [B, T, Hv, 128] and the final states [n, Hv, 128, 128].
    """
    do, dfinal = cotangents
    *chunked, do, runs, restore = _in_chunks((*tokens, do), cu_seqlens)
    given = ChunkedTokens(*chunked)
    call = DeltaRuleBackwardCall(given, do, runs, initial_state, dfinal, scale, use_qk_l2norm)
    if rule.channels:
        if jax.default_backend() == "gpu":
            warnings.warn(
                f"{op}: 'xla' computes the gradient inside each chunk instead of the GPU's kernel: "
                "it has no decays per channel backward, and makes the chunks' states alone",
                skip_file_prefixes=(PACKAGE,),
            )
        states, dstates, dstart = channel_states(call, interpret=interpret)
        alone = partial(_chunk_alone, rule, states, scale=scale, use_qk_l2norm=use_qk_l2norm)
        gradients = jax.vjp(alone, *given)[1]((do, dstates.astype(jnp.float32)))
    else:
        gradients, dstart = gdn_backward_mosaic(call, interpret=interpret)
    return *map(restore, gradients), None if initial_state is None else dstart


def _in_chunks(arrays: tuple[jax.Array, ...], cu_seqlens: Any) -> tuple[Any, ...]:
    """[B, T, ...] as [N * 64, ...] in chunks of one sequence each, with 0 where there is no token;
    then the runs of `state_pass`, and what brings an array back."""
    batch, length = arrays[0].shape[:2]
    if cu_seqlens is None:
        chunks = -(-length // CHUNK)
        pad = chunks * CHUNK - length
        first = chunks * np.arange(batch, dtype=np.int32)
        runs: Any = np.stack([first, np.full_like(first, chunks)])

        def chunked(x: jax.Array) -> jax.Array:
            x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
            return x.reshape(-1, *x.shape[2:])

        def restore(x: jax.Array) -> jax.Array:
            return x.reshape(batch, chunks * CHUNK, *x.shape[1:])[:, :length]

        return *map(chunked, arrays), runs, restore

    if isinstance(cu_seqlens, np.ndarray) and not (cu_seqlens % CHUNK).any():
        if length == cu_seqlens[-1]:  # as the tokens lie
            runs = np.stack([cu_seqlens[:-1], np.diff(cu_seqlens)]).astype(np.int32) // CHUNK
            return *(x[0] for x in arrays), runs, lambda x: x[None]

    packing = pack(jnp.asarray(cu_seqlens), length, CHUNK)
    ends = jnp.asarray(cu_seqlens, jnp.int32)
    number = -(-jnp.diff(ends) // CHUNK)
    runs = jnp.stack([jnp.cumsum(number, dtype=jnp.int32) - number, number])

    def gathered(x: jax.Array) -> jax.Array:
        return x[0].at[packing.token].get(mode="fill", fill_value=0, unique_indices=True)

    def scattered(x: jax.Array) -> jax.Array:
        return x.at[packing.row].get(mode="fill", fill_value=0, unique_indices=True)[None]

    return *map(gathered, arrays), runs, scattered


def _chunk_alone(
    rule: DeltaRule,
    states: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    scale: float,
    use_qk_l2norm: bool,
) -> tuple[jax.Array, jax.Array]:
    """Outputs [N * 64, Hv, 128] of chunks, and the states behind them, from those before them."""
    dtype, heads = jnp.dtype(jnp.bfloat16), v.shape[1]  # the states' own
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    q, k = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (q, k))
    g = jnp.maximum(g.astype(jnp.float32), LOWEST_LOG_DECAY)

    def by_head(x: jax.Array) -> jax.Array:
        """[N * 64, H, ...] -> [N, 1, H, 64, ...]"""
        return jnp.moveaxis(x.reshape(-1, 1, CHUNK, *x.shape[1:]), 3, 2)

    q, k, rows, g, beta = map(by_head, (q, k, v, g, beta.astype(jnp.float32)))
    made, before = rule.operands(q, k, g, beta, dtype), states[:, None].astype(jnp.float32)
    seen = matmul("nbhcd,nbhvd->nbhcv", made.k_read, before, dtype)
    u = matmul("nbhij,nbhjv->nbhiv", made.x, rows.astype(jnp.float32) - seen, dtype)
    behind = made.decay * before + matmul("nbhcv,nbhcd->nbhvd", u, made.k_written, dtype)
    out = matmul("nbhcd,nbhvd->nbhcv", made.q_read, before, dtype)
    out = scale * (out + matmul("nbhij,nbhjv->nbhiv", made.p(), u, dtype))
    return jnp.moveaxis(out.astype(v.dtype), 3, 2).reshape(v.shape), behind[:, 0]


def with_chunk_gradient(kernel: Callable[..., Any], gradient: Callable[..., Any]) -> Any:
    """`kernel(q, k, v, g, beta, initial_state, cu_seqlens)`, differentiated in reverse mode by
    `gradient` of those arguments and the cotangents."""
    differentiable = jax.custom_vjp(kernel)

    def backward(arguments: tuple[Any, ...], cotangents: tuple[jax.Array, ...]) -> Any:
        return *gradient(arguments, cotangents), None

    differentiable.defvjp(lambda *arguments: (kernel(*arguments), arguments), backward)
    return differentiable


@contextlib.contextmanager
def reverse_mode_only(op: str) -> Iterator[None]:
    """JAX's error in forward mode says what to use instead; inside of `jax.jit` it is JAX's own."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        recurrent = op.replace("chunk_", "recurrent_")
        raise TypeError(
            f"{op}: it has no forward-mode gradient; use jax.grad or jax.vjp, or {recurrent}"
        ) from error
