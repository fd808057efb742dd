"""The chunked form with a decay per channel of the key: A, P and the factors of the state.

With `G` [C, Dk] the running sum of the log decays in a chunk, and rows i, j of it:

    A_ij      = beta_i sum_d k_id k_jd exp(G_id - G_jd)   for i > j, else 0
    P_ij      =        sum_d q_id k_jd exp(G_id - G_jd)   for i >= j, else 0
    k_read    = k exp(G)            q_read = q exp(G)
    k_written = k exp(G_last - G)   decay  = exp(G_last)

exp(G_i - G_j) fits into a matrix product only as a product of two factors, and exp(-G_j) of a
strong decay is inf. The code therefore divides a chunk into halves, those into halves, and so on. A
row i of a second half and a column j of the first half are joined at the place m between the
halves:

    exp(G_i - G_j) = exp(G_i - G_m) exp(G_m - G_j)

Both factors are at most 1, whatever the gates are. A factor is 0 in float32 only if the whole decay
is below 1e-38. Sums are added half by half and never formed as differences, so a small decay after
a large one keeps its digits.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxattn.core.numerics.matmul import matmul
from jaxattn.ops.gdn.chunk_xla import ChunkOperands, DeltaRule
from jaxattn.ops.gdn.triangular_inverse import lower_pairs, unit_lower_inverse

MATMUL_COLUMNS = 16  # columns of a block from which on a matmul computes it


def channel_operands(
    q: Float[Array, "N B H C Dk"],
    k: Float[Array, "N B H C Dk"],
    g: Float[Array, "N B H C Dk"],
    beta: Float[Array, "N B H C"],
    dtype: jnp.dtype,
) -> ChunkOperands:
    """Returns the operands of the scan over chunks; C is a power of two."""
    # Sums from the start of a token's block up to the token, and from after it to the block's end.
    up_to, behind = g, jnp.zeros_like(g)
    # Blocks of one token, whose query sees its own key without decay.
    rows = (q.astype(jnp.float32), k.astype(jnp.float32))
    own = jnp.sum(rows[0] * rows[1], axis=-1)
    p, a = own[..., None, None], jnp.zeros_like(own)[..., None, None]
    size = 1
    with jax.named_scope("decay"):
        while size < g.shape[-2]:
            first_behind, _ = _halves(behind, size)
            _, second_up_to = _halves(up_to, size)
            seen = _halves(rows[1], size)[0] * jnp.exp(first_behind)
            q_and_k = [_halves(x, size)[1] * jnp.exp(second_up_to) for x in rows]
            scores = _scores(jnp.concatenate(q_and_k, axis=-2), seen, dtype)
            p = lower_pairs(p, scores[..., :size, :])
            a = lower_pairs(a, scores[..., size:, :])
            up_to, behind = _joined_sums(up_to, behind, size)
            size *= 2
        from_start, to_end = jnp.exp(up_to), jnp.exp(behind)
    with jax.named_scope("invert"):
        x = unit_lower_inverse(a[..., 0, :, :] * beta[..., :, None]) * beta[..., None, :]
    q_read, k_read = ((row * from_start).astype(dtype) for row in rows)
    return ChunkOperands(
        q_read=q_read,
        k_read=k_read,
        k_written=(rows[1] * to_end).astype(dtype),
        x=x.astype(dtype),
        from_start=None,
        to_end=None,
        decay=from_start[..., -1:, :],
        p=lambda: p[..., 0, :, :],
    )


KIMI = DeltaRule(channel_operands, channels=True, sigmoid=True)


def _scores(rows: Array, columns: Array, dtype: jnp.dtype) -> Array:
    """Returns rows columns^T of each block in float32; for few columns, sums are faster."""
    if columns.shape[-2] < MATMUL_COLUMNS:
        return jnp.sum(rows[..., :, None, :] * columns[..., None, :, :], axis=-1)
    return matmul("nbhmid,nbhmjd->nbhmij", rows, columns, dtype)


def _halves(x: Array, size: int) -> tuple[Array, Array]:
    """Returns the halves of the blocks of 2 * size rows, each [..., C / 2 size, size, D]."""
    pairs = x.reshape(*x.shape[:-2], x.shape[-2] // (2 * size), 2, size, x.shape[-1])
    return pairs[..., 0, :, :], pairs[..., 1, :, :]


def _joined_sums(sum_to_row: Array, sum_to_end: Array, size: int) -> tuple[Array, Array]:
    """Returns both sums for blocks of 2 * size rows, from those for blocks of `size` rows."""
    (first, second), (first_to_end, second_to_end) = (
        _halves(sum_to_row, size),
        _halves(sum_to_end, size),
    )
    shape = sum_to_row.shape
    sum_to_row = jnp.stack([first, second + first[..., -1:, :]], axis=-3)
    second_total = second[..., -1:, :]
    sum_to_end = jnp.stack([first_to_end + second_total, second_to_end], axis=-3)
    return sum_to_row.reshape(shape), sum_to_end.reshape(shape)
