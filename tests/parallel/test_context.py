"""What GPUs with parts of a row's pages send each other: outputs and their log-sum-exps."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.parallel.context_parallel import _apart, _joined


@pytest.mark.parametrize("dtype, numbers", [("bfloat16", 10), ("float16", 10), ("float32", 9)])
def test_outputs_and_their_lse_are_sent_bit_for_bit(dtype, numbers):
    random = np.random.default_rng(5)
    out = jnp.asarray(random.standard_normal((3, 2, 8)), dtype).at[0, 0, 0].set(jnp.nan)
    lse = jnp.asarray(random.standard_normal((3, 2)), jnp.float32).at[1].set(-jnp.inf)
    joined = _joined(out, lse)
    assert joined.shape == (3, 2, numbers) and joined.dtype.itemsize == out.dtype.itemsize
    found, found_lse = _apart(joined, out.dtype)
    np.testing.assert_array_equal(found, out.astype(jnp.float32))
    np.testing.assert_array_equal(found_lse, lse)
