"""What a row's keys have in common, by the kernel, against plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.kernels.turboquant.cache.key_mean import turbo_common_mosaic
from jaxattn.ops.turboquant.key_mean import MOST, SAMPLES, common_key
from tests.helpers.at_once import at_once
from tests.helpers.kernel_cases import both_devices, no_races, slow
from tests.helpers.turbo_cases import turbo_case

pytestmark = pytest.mark.filterwarnings("ignore:the cache format:UserWarning")


@pytest.mark.slow_cases(
    reason="tokens of another row's page; found by the other presets, dims and pages too"
)
@both_devices
@pytest.mark.parametrize(
    "preset, dim, page, window",
    [
        ("4bit_nc", 128, 64, None),
        slow("k3v4_nc", 64, 128, 2500),
        slow("3bit_nc", 256, 16, None),
        slow("4bit_nc", 256, 32, 40),
        slow("3bit_nc", 128, 64, 300),
    ],
)
def test_as_plain_jax(preset, dim, page, window, implementation):
    """Rows of many groups, of one and a token (17), of one token, of none; a page that does not
    exist."""
    lens = [3000, 150, 17, 1, 0, 90]
    case = turbo_case(lens, preset, dim=dim, page=page, q_len=9, window=window)
    tables = np.array(case.block_tables)
    tables[5, : 64 // page] = -1
    begins = np.zeros(len(lens), int) if window is None else np.maximum(np.array(lens) - 2600, 0)
    held = jnp.asarray(np.stack([begins, lens]), jnp.int32)
    args = case.kv_cache, jnp.asarray(tables)
    at = jnp.full(1, case.layer, jnp.int32)
    wanted = at_once(common_key, case.form, *args, held[1], held[0], at)
    interpret = implementation == "mosaic_gpu_interpret"
    op = functools.partial(
        turbo_common_mosaic, form=case.form, samples=SAMPLES, max_abs=MOST, interpret=interpret,
    )  # fmt: skip
    if interpret:
        with no_races():
            found = jax.block_until_ready(jax.jit(op)(*args, held, at))
    else:
        found = jax.jit(op)(*args, held, at)
    assert np.isfinite(found).all() and np.asarray(wanted)[:3].any()
    np.testing.assert_allclose(found, wanted, atol=2e-6, rtol=1e-5)
