"""One call of the MLA decode kernel, with a batch of two rows and one padding row.

python3 examples/kernel.py
"""

import functools

import jax
import jax.numpy as jnp

from jaxattn import Arena, mla

HEADS, RANK, ROPE, PAGE = 16, 512, 64, 64
SCALE = (128 + ROPE) ** -0.5  # as in DeepSeek: from the width of a head, not of the latent


def main() -> None:
    # Each token of the cache is one latent, 512 + 64 numbers for all heads together.
    cache = jax.random.normal(jax.random.key(0), (8, PAGE, RANK + ROPE), jnp.bfloat16)
    q = jax.random.normal(jax.random.key(1), (3, 1, HEADS, RANK + ROPE), jnp.bfloat16)
    # Row 0 has 100 tokens on pages 2 and 0; row 1 has 7 on page 5; row 2 is padding.
    block_tables = jnp.array([[2, 0], [5, -1], [-1, -1]], jnp.int32)
    seq_lens = jnp.array([100, 7, 0], jnp.int32)

    # Shapes determine the scratch memory: one buffer, which is donated to the step and returned.
    spec = mla.scratch(batch=3, q_len=1, num_heads=HEADS, max_pages=2, page_size=PAGE)
    step = jax.jit(functools.partial(mla.mla_decode, scale=SCALE), donate_argnames="arena")
    out, lse, arena = step(q, cache, block_tables, seq_lens, arena=Arena.allocate(spec))

    # Row 1 by the formula, in float32.
    keys = cache[5, :7].astype(jnp.float32)
    scores = q[1, 0].astype(jnp.float32) @ keys.T * SCALE
    wanted = jax.nn.softmax(scores) @ keys[:, :RANK]
    error = jnp.abs(out[1, 0] - wanted).max()

    print(f"out {out.shape}, {arena.nbytes:,} bytes of scratch")
    print(f"row 1 is within {error:.1e} of softmax(q K) V")
    print(f"the padding row is {jnp.abs(out[2]).max():g}, and its log-sum-exp {lse[2].max():g}")


if __name__ == "__main__":
    main()
