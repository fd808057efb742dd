"""Numbers read at the places of their bits are those of slots that are turned round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.turboquant.code_gather import page_codes
from jaxattn.core.turboquant.codec import HEAD_DIMS, PRESETS, TurboFormat
from tests.helpers.turbo_cases import read_page
from tests.helpers.turbo_compiled import dequantize, page_slots, unpack

pytestmark = pytest.mark.filterwarnings("ignore:the cache format:UserWarning")


@pytest.mark.sampled
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("preset", PRESETS)
def test_any_bytes_give_the_numbers_of_their_slots(preset, dim):
    form = TurboFormat(preset=preset, head_dim=dim)
    rng = np.random.default_rng(0)
    pages = rng.integers(0, 256, (40, 2, 64 * form.slot_bytes)).astype(np.uint8)
    found = dequantize(form, jax.jit(page_codes, static_argnums=0)(form, jnp.asarray(pages)))
    slots = page_slots(form, jnp.asarray(pages))
    for one, other in zip(found, dequantize(form, unpack(form, slots)), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(found, read_page(form, pages[3, 1]), strict=True):
        np.testing.assert_allclose(one[3, 1], other, rtol=1e-6, atol=1e-6)
