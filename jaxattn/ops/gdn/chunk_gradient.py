"""The gradient of the chunked delta rules by kernels, for calls whose forward pass was a kernel."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.core.dispatch import without_gradient
from jaxattn.kernels.gdn.backward.launch import (
    ChunkedTokens,
    DeltaRuleBackwardCall,
    gdn_backward_mosaic,
    kda_backward_mosaic,
)
from jaxattn.kernels.gdn.chunk.tiles import CHUNK
from jaxattn.kernels.gdn.prefill.intra_chunk.launch import ChunkMatrices, whole_chunk_matrices
from jaxattn.ops.gdn.chunk_xla import DeltaRule, pack


def chunk_gradient(
    rule: DeltaRule,
    tokens: tuple[jax.Array, ...],
    initial_state: jax.Array | None,
    cu_seqlens: Any,
    matrices: ChunkMatrices | None,
    cotangents: tuple[jax.Array, jax.Array],
    *,
    scale: float,
    use_qk_l2norm: bool,
    interpret: bool,
) -> tuple[Any, ...]:
    """Computes the gradients of q, k, v, g, beta and the initial state by kernels.

    Args:
        tokens: q, k, v [B, T, H, 128], g and beta [B, T, Hv].
        cu_seqlens: A traced array, a NumPy array, or None.
        matrices: The result of `matrices_of_both_passes`.
        cotangents: Cotangents of o [B, T, Hv, 128] and of the final states [n, Hv, 128, 128].
    """
    do, dfinal = cotangents
    *chunked, do, runs, restore = _in_chunks((*tokens, do), cu_seqlens)
    backward = kda_backward_mosaic if rule.channels else gdn_backward_mosaic
    call = DeltaRuleBackwardCall(
        ChunkedTokens(*chunked), do, runs, initial_state, dfinal, scale, use_qk_l2norm, matrices
    )
    of_tokens, dstart = backward(call, interpret=interpret)
    return *map(restore, of_tokens), None if initial_state is None else dstart


def matrices_of_both_passes(
    rule: DeltaRule,
    tokens: tuple[jax.Array, ...],
    cu_seqlens: Any,
    *,
    scale: float,
    use_qk_l2norm: bool,
    interpret: bool,
) -> ChunkMatrices | None:
    """Returns the chunk matrices of the forward pass, extended for the backward pass.

    Returns None if each pass computes its own. If some chunks are not full, chunks begin at other
    tokens in the backward pass. In float16, the backward pass uses bfloat16. With decays per
    channel, keys and queries would have to be saved for each value head.
    """
    q, k, v, g, beta = tokens
    length, lengths = v.shape[1], None
    if cu_seqlens is None:
        lengths = np.array([length])
    elif isinstance(cu_seqlens, np.ndarray) and cu_seqlens[-1] == length:
        lengths = np.diff(cu_seqlens)
    if rule.channels or q.dtype != jnp.bfloat16 or lengths is None:
        return None
    if (lengths == 0).any() or (lengths % CHUNK).any():
        return None
    q, k, g, beta = (x.reshape(-1, *x.shape[2:]) for x in (q, k, g, beta))
    return whole_chunk_matrices(
        q, k, g.astype(jnp.float32), beta.astype(jnp.float32),
        scale=scale, use_qk_l2norm=use_qk_l2norm, backward=True, interpret=interpret,
    )  # fmt: skip


def _in_chunks(arrays: tuple[jax.Array, ...], cu_seqlens: Any) -> tuple[Any, ...]:
    """Reshapes [B, T, ...] to [N * 64, ...], chunks of one sequence each with 0 as padding.

    Returns these arrays, the runs of `state_pass`, and a function that restores the first shape.
    """
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
        if length == cu_seqlens[-1]:  # the tokens are in chunks already
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


def with_chunk_gradient(
    op: str, kernel: Callable[..., Any], matrices: Callable[..., Any], gradient: Callable[..., Any]
) -> Any:
    """Gives `kernel(None, q, k, v, g, beta, initial_state, cu_seqlens)` a reverse-mode gradient.

    `gradient` computes it from the same arguments, the result of `matrices`, and the cotangents.
    """
    differentiable = jax.custom_vjp(functools.partial(kernel, None))

    def forward(*arguments: Any) -> Any:
        arguments = without_gradient(f"the gradient of {op}", arguments)
        made = matrices(*arguments)
        kept = None if made is None else made._replace(x=None)
        return kernel(made, *arguments), (arguments, kept)

    def backward(residuals: tuple[Any, ...], cotangents: tuple[jax.Array, ...]) -> Any:
        arrays = without_gradient(f"the gradient of {op}", (*residuals, cotangents))
        return *gradient(*arrays), None

    differentiable.defvjp(forward, backward)
    return differentiable
