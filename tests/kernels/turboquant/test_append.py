"""`turbo_append`: norms, rotation, codes and write in one kernel, against the same in plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.numerics.rope import RopeConfig, rotation
from jaxattn.core.turboquant.codec import PRESETS, TurboFormat
from jaxattn.gqa import pack_gqa_weights, turbo_append
from jaxattn.kernels.turboquant.cache.append import turbo_append_mosaic
from tests.helpers.kernel_cases import NO_SUCH_PAGE, both_devices, no_races, slow
from tests.helpers.turbo_compiled import dequantize, page_slots, unpack

pytestmark = pytest.mark.filterwarnings("ignore:the cache format:UserWarning")
EPS, PAGE = 1e-5, 32


def arguments(preset, dim, lens, *, heads=4, kv_heads=2, q_len=2, gated=False, dtype=jnp.bfloat16):
    """A stack of two layers whose cache is bytes of 0xFF, and rows of so many tokens; one key is
    0, one is large, and one value is constant."""
    form, rng = TurboFormat(preset=preset, head_dim=dim), np.random.default_rng(dim)
    batch = len(lens)
    draw = lambda *shape: rng.normal(size=(batch, q_len, *shape))  # noqa: E731
    norms = [jnp.asarray(rng.normal(size=(2, dim)) / 4, jnp.float32) for _ in range(2)]
    q, k, v = draw(heads, dim * (1 + gated)), draw(kv_heads, dim), 30 * draw(kv_heads, dim)
    k[0, 0, 0], k[-1, -1, 0], v[0, -1, -1] = 0, 1e4, 2.5
    count = [-(-n // PAGE) for n in lens]
    tables = np.full((batch, max(count) + 1), NO_SUCH_PAGE, np.int32)
    numbers = iter(rng.permutation(sum(count) + 1))
    for row, pages in enumerate(count):
        tables[row, :pages] = [next(numbers) for _ in range(pages)]
    cache = jnp.full((2, sum(count) + 1, kv_heads, PAGE * form.slot_bytes), 0xFF, jnp.uint8)
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    weights = pack_gqa_weights(*norms, zero_centered=True)
    lens = jnp.asarray(lens, jnp.int32)
    return form, (q, k, v, weights, cache, jnp.asarray(tables), lens)


def append(form, args, config, implementation, query_lens=None):
    """In the interpreter with race detection."""
    q_len, lens = args[0].shape[1], args[-1]
    new = q_len if query_lens is None else query_lens[:, None]
    turned = rotation(jnp.maximum(lens[:, None] - new + jnp.arange(q_len), 0), config)
    options = dict(form=form, eps=EPS, query_lens=query_lens, layer=1)
    if implementation != "mosaic_gpu_interpret":
        op = functools.partial(
            turbo_append, rotation=turned, config=config, implementation=implementation, **options
        )
        return jax.jit(op)(*args)
    op = functools.partial(
        turbo_append_mosaic, angles=turned.angles, interleaved=config.interleaved,
        dtype=args[0].dtype, interpret=True, **options,
    )  # fmt: skip
    with no_races():
        return jax.block_until_ready(jax.jit(op)(*args))


def assert_alike(form, args, found, expected):
    """Queries to their last bit but one; of the cache what is numbers, and that others' bytes stay.

    A number that lies between two codes may become either: both are as near."""
    (queries, cache), (wanted, reference) = found, expected
    np.testing.assert_allclose(
        np.asarray(queries, np.float32), np.asarray(wanted, np.float32), rtol=2**-7, atol=1e-5
    )
    cache, reference = (np.asarray(x) for x in (cache, reference))
    mine, theirs = (page_slots(form, x[1]) for x in (cache, reference))
    np.testing.assert_array_equal(cache[0], 0xFF)
    np.testing.assert_array_equal(*((np.asarray(x) == 0xFF).all(-1) for x in (mine, theirs)))
    written = ~(np.asarray(theirs) == 0xFF).all(-1)
    assert written.any()
    both = (dequantize(form, unpack(form, x)) for x in (mine, theirs))
    for some, other in zip(*both, strict=True):
        some, other = (np.asarray(x)[written] for x in (some, other))
        # As numbers: a key of zeros may be one of -0, whose bytes are others.
        assert (some == other).mean() > 0.99
        error = np.linalg.norm(some - other, axis=-1)
        assert (error <= 0.05 * np.linalg.norm(other, axis=-1) + 1e-6).all()


@pytest.mark.slow_cases(
    reason="bits in another place; found by both widths, in 4bit_nc and 3bit_nc too"
)
@pytest.mark.sampled
@both_devices
@pytest.mark.parametrize(
    "preset, dim, rotated, options",
    [
        ("k8v4", 64, 64, {}),
        ("4bit_nc", 128, 128, dict(heads=3, kv_heads=1)),
        slow("k3v4_nc", 64, 32, dict(gated=True)),
        ("3bit_nc", 256, 64, dict(heads=2, kv_heads=1, gated=True)),
    ],
)
def test_writes_what_xla_writes_and_touches_nothing_else(
    preset, dim, rotated, options, implementation
):
    """A row across pages, one without tokens, and one with fewer new tokens than places."""
    form, args = arguments(preset, dim, [PAGE + 1, 0, 1], **options)
    config = RopeConfig(dim=rotated, interleaved="3" in preset[:2])
    query_lens = jnp.array([2, 2, 1], jnp.int32)
    found = append(form, args, config, implementation, query_lens)
    assert_alike(form, args, found, append(form, args, config, "xla", query_lens))


@pytest.mark.slow(
    reason="a NaN that reaches another token's codes; found by a NaN in "
    "ops/turboquant/test_attention and by the same test on a GPU too"
)
@both_devices
def test_a_nan_and_an_infinity_stay_in_their_token(implementation):
    form, args = arguments("4bit_nc", 64, [5, 7])
    k, v = args[1].at[0, 1, 0, 3].set(jnp.nan), args[2].at[1, 0, 1, 2].set(jnp.inf)
    args = (args[0], k, v, *args[3:])
    cache = append(form, args, RopeConfig(dim=64, interleaved=False), implementation)[1]
    slots = page_slots(form, np.asarray(cache)[1, args[5][:, 0]])
    keys, values = map(np.array, dequantize(form, unpack(form, slots)))
    assert np.isnan(keys[0, 0, 4]).all() and np.isnan(values[1, 1, 5]).all()
    keys[0, 0, 4], values[1, 1, 5] = 0, 0
    for row, new in ((0, slice(3, 5)), (1, slice(5, 7))):
        assert np.isfinite(keys[row, :, new]).all() and np.isfinite(values[row, :, new]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "dim, heads, kv_heads, lens, q_len",
    [
        # Rows of 4,096 tokens are few: caches, and copies to compare, of 64 took 10 GB.
        (128, 64, 8, [4096] * 3 + [70, 33, 1] * 20 + [32], 1),
        (128, 32, 8, [3000, 2048], 2048),
        (256, 16, 2, [5000, 0, 17], 300),
        (64, 64, 8, [129, 64, 63], 5),
    ],
)
def test_real_shapes(dim, heads, kv_heads, lens, q_len, preset):
    form, args = arguments(preset, dim, lens, heads=heads, kv_heads=kv_heads, q_len=q_len)
    query_lens = jnp.minimum(args[-1], q_len)
    config = RopeConfig(dim=dim, interleaved=False)
    found = append(form, args, config, "mosaic_gpu", query_lens)
    assert_alike(form, args, found, append(form, args, config, "xla", query_lens))


def test_what_the_kernel_does_not_take_is_refused():
    form, args = arguments("k8v4", 64, [5], heads=3, kv_heads=1)
    config = RopeConfig(dim=64, interleaved=False)
    with pytest.raises(NotImplementedError, match="H and Hk multiples of 2 for 64 dims, got H = 3"):
        append(form, args, config, "mosaic_gpu_interpret")
