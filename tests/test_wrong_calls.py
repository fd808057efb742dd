"""Public names called with what they cannot take: the argument is named, and nothing has run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxattn
from jaxattn import Arena, ArenaError, ArenaSpec, Limits, Request, gqa, mla, moe
from jaxattn.engine.startup.engine_build import prepare
from jaxattn.models import Hybrid, load
from jaxattn.models.checkpoint import EMBEDDED

LOGITS = np.zeros((2, 32), np.float32)
ROUTER = dict(experts=32, top_k=2, scores="sigmoid")
EXPERTS = [np.zeros(shape, np.float32) for shape in ((2, 128), (4, 64, 128), (4, 128, 32))]
IDS = np.zeros((2, 2), np.int32)


class MaskAlone:
    def mask(self, words):
        pass


def experts(**options):
    x, gate_up, down = EXPERTS
    return moe.mixture_of_experts(x, IDS, np.ones((2, 2), np.float32), gate_up, down, **options)


def pairs(**options):
    shape = dict(q_len=1, num_heads=4, num_kv_heads=2, head_dim=64, max_pages=4, page_size=16)
    return gqa.decode_schedule(jnp.ones(1, jnp.int32), **shape, **options)


def append(**options):
    q, k = jnp.zeros((1, 1, 4, 64)), jnp.zeros((1, 1, 2, 64))
    config = jaxattn.RopeConfig(dim=64)
    rotation = jaxattn.rotation(jnp.zeros((1, 1), jnp.int32), config)
    cache, addressing = jnp.zeros((2, 2, 16, 2, 64)), ([[0]], [1])
    return gqa.gqa_append(
        q, k, k, None, cache, *addressing, rotation=rotation, config=config, **options
    )


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: Arena.allocate({"x": 1}), TypeError, "spec must be an ArenaSpec, .* got dict"),
        (lambda: ArenaSpec.of(x="wide"), ArenaError, r"'x' must be \(shape, dtype\), got 'wide'"),
        (lambda: ArenaSpec.of(x=(4,)), ArenaError, r"must be \(shape, dtype\), got \(4,\)"),
        (lambda: jaxattn.check_aliasing(lambda x: x), TypeError, "compiled must be jax.jit.*funct"),
        (lambda: jaxattn.check_aliasing(None), TypeError, "compiled must be jax.jit"),
        (
            lambda: Hybrid("tiny"),
            TypeError,
            "config must be .*HybridConfig, got str",
        ),
        (lambda: load(None), TypeError, "load: folder must be a path, got NoneType"),
        (lambda: Limits(decode_buckets=4), TypeError, r"decode_buckets must be a tuple .* got 4"),
        (lambda: Limits(q_lens=None), TypeError, "q_lens must be a tuple"),
        # A negative one would count from the end of the vocabulary.
        (lambda: Request(b"x", logit_bias={-1: 1}), ValueError, "token must be from 0 .* got -1"),
        (
            lambda: Request(b"x", stop_tokens=[7, -1]),
            ValueError,
            r"stop_tokens\[1\] must be from 0",
        ),
        (lambda: Request(b"x", grammar="json"), TypeError, "grammar must have the methods mask"),
        (lambda: Request(b"x", grammar=MaskAlone()), TypeError, "methods mask and accept"),
        (lambda: moe.Router(**ROUTER | dict(experts="32")), ValueError, "experts must be .*'32'"),
        (lambda: moe.Router(**ROUTER | dict(top_k=2.0)), ValueError, "top_k must be .* got 2.0"),
        (lambda: moe.Router(**ROUTER | dict(groups=0)), ValueError, "groups must be .* got 0"),
        (lambda: moe.Router(**ROUTER, scale=np.nan), ValueError, "scale must be finite, got nan"),
        (lambda: moe.route(LOGITS, None, "best"), TypeError, "router must be a moe.Router"),
        (lambda: moe.route(LOGITS, [0] * 32, moe.Router(**ROUTER)), TypeError, "bias must be an"),
        (lambda: experts(listed="all"), TypeError, "listed must be a result of choose_experts"),
        (lambda: pairs(batch_invariant="no"), TypeError, "batch_invariant must be True or False"),
        (lambda: append(dtype=jnp.int32), TypeError, "dtype must be bfloat16 or .* got int32"),
        (lambda: append(dtype="wide"), TypeError, "dtype must be bfloat16 or .* got wide"),
    ],
)
def test_it_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_an_engine_without_jit_is_refused():
    model, params = load(EMBEDDED)
    with jax.disable_jit(), pytest.raises(ValueError, match="JAX_DISABLE_JIT is set; unset it"):
        prepare(model, params)


def test_an_array_that_was_donated_is_named():
    q = jnp.zeros((1, 1, 2, 40))
    cache = jnp.zeros((1, 16, 40))
    jax.jit(lambda x: x + 1, donate_argnums=0)(cache)
    with pytest.raises(ValueError, match=r"kv_cache \(1, 16, 40\) is deleted: it was donated to"):
        mla.mla_decode(q, cache, [[0]], [1], scale=1.0, kv_lora_rank=32)
