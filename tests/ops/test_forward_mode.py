"""`jax.jvp`: the docstring of what has reverse mode only says so, and no other does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gdn, mla
from jaxattn.core.dispatch import with_gradient_of
from jaxattn.nn import (
    GatedDeltaNet,
    GatedMLP,
    GroupedQueryAttention,
    KimiDeltaAttention,
    Linear,
    MultiHeadLatentAttention,
    RMSNorm,
)
from tests.helpers.every_op import OPS, arguments

MODULES = {
    module.__name__: module
    for module in (
        GatedDeltaNet,
        GatedMLP,
        GroupedQueryAttention,
        KimiDeltaAttention,
        Linear,
        MultiHeadLatentAttention,
        RMSNorm,
    )
}
NOT_OF_FLOATS = (
    "rotation",
    "softmax_scale",
    "mla.decode_schedule",
    "mla.scratch",
    "gqa.scratch",
    "gdn.scratch",
)
IN_BOTH = [name for name in OPS if name not in NOT_OF_FLOATS]


@pytest.mark.sampled
@pytest.mark.parametrize("name", IN_BOTH)
def test_the_docstring_says_which_op_has_reverse_mode_only(name):
    given = arguments(name)

    def is_float(x):
        return isinstance(x, np.ndarray) and x.dtype == np.float32

    floats = {key: x for key, x in given.items() if key in ("outs", "lses") or is_float(x)}

    def op(floats):
        outs = jax.tree.leaves(OPS[name](**(given | floats)))
        return [x for x in outs if jnp.issubdtype(x.dtype, jnp.floating)]

    def forward(floats):
        return jax.jvp(op, (floats,), (jax.tree.map(jnp.ones_like, floats),))

    described = MODULES.get(name.partition(".")[0], OPS[name]).__doc__
    if "in reverse mode only" in described and "only where the kernel runs" not in described:
        with pytest.raises(TypeError, match="forward-mode"):  # JAX says so when it lowers
            jax.jit(forward).lower(floats)
    else:
        jax.jit(forward).lower(floats)
    jax.eval_shape(jax.grad(lambda floats: sum(x.sum() for x in op(floats))), floats)


def test_kernels_with_the_gradient_of_a_reference_have_reverse_mode_only():
    op = with_gradient_of(jnp.sin, lambda x: jnp.sin(x))
    assert jax.grad(op)(1.0) == jnp.cos(1.0)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(op, (1.0,), (1.0,))
    for op in (mla.mla_prefill, mla.causal_attention, gdn.chunk_gated_delta_rule):
        assert "in reverse mode only" in op.__doc__
