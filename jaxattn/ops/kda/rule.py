"""Kimi's delta rule among the delta rules (`jaxattn.ops.gdn.rule`)."""

import jax
import jax.numpy as jnp

from jaxattn.kernels.gdn_prefill.channels import Made
from jaxattn.ops.gdn.rule import Rule
from jaxattn.ops.kda.channel_decay import channel_operands


def _of_kernel(q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array, dtype: jnp.dtype) -> Made:
    """The operands of the scan, for the kernel: chunks and heads are its axes."""
    made = channel_operands(q[:, None], k[:, None], g[:, None], beta[:, None], dtype)
    return Made(
        q_read=made.q_read[:, 0],
        k_read=made.k_read[:, 0],
        k_written=made.k_written[:, 0],
        x=made.x[:, 0],
        p=made.p()[:, 0].astype(dtype),
        decay=made.decay[:, 0, :, 0],
    )


KIMI = Rule(channel_operands, channels=True, sigmoid=True, make=_of_kernel)
