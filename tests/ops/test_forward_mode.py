"""`jax.jvp`: the docstring of what has reverse mode only says so, and no other does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.dispatch import kernels_untraced
from jaxattn.nn import (
    GatedDeltaNet,
    GatedMLP,
    GroupedQueryAttention,
    KimiDeltaAttention,
    Linear,
    MultiHeadLatentAttention,
    RMSNorm,
)
from jaxattn.nn.linear import matmul
from tests.helpers import every_kernel
from tests.helpers.every_kernel import on_hopper
from tests.helpers.every_op import OPS, arguments
from tests.ops.test_transforms import REFUSED, ROWS

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
KERNELS = [name for name, (gradient, _) in ROWS.items() if gradient != REFUSED]
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
        said = r"^\w+ has no forward-mode gradient of \w+ .*; use jax.grad or jax.vjp"
        with pytest.raises(TypeError, match=said):
            jax.jit(forward).lower(floats)
    else:
        jax.jit(forward).lower(floats)
    jax.eval_shape(jax.grad(lambda floats: sum(x.sum() for x in op(floats))), floats)


def test_a_linear_has_hessians():
    x, weight = (
        np.random.default_rng(0).normal(size=n).astype("float32") for n in ((2, 3), (3, 2))
    )

    def loss(weight):
        return (matmul(x, weight, dtype=jnp.float32, out_dtype=jnp.float32) ** 3).sum()

    found, wanted = jax.jit(lambda w: (jax.hessian(loss)(w), jax.jacrev(jax.grad(loss))(w)))(weight)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_in_forward_mode_names_its_argument_and_what_to_use(name):
    """Of all floats; the first that the op meets is named."""
    arrays, rest = every_kernel.arguments(name)

    def is_float(x):
        return all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(x))

    floats = {key: x for key, x in arrays.items() if is_float(x)}

    def op(floats):
        return every_kernel.OPS[name](**(arrays | floats), **rest)

    own = {"gated_layer": "linear_layer", "gated_fp8_layer": "linear_fp8_layer"}.get(name, name)
    said = rf"^{own} has no forward-mode gradient of [\w.]+ .*; use jax.grad or jax.vjp, or "
    with on_hopper(), kernels_untraced(True), pytest.raises(TypeError, match=said):
        jax.jvp(op, (floats,), (floats,))
