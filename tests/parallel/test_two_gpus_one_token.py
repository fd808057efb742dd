"""One token over two GPUs: layers one after another give what a loop over them gives.

    python -m pytest -m gpu -p no:xdist -s tests/parallel/test_two_gpus_one_token.py

About 40 s, nearly all of it compiling.
"""

import jax
import numpy as np
import pytest

from jaxattn import check_aliasing
from jaxattn.core.rope import RopeConfig
from jaxattn.models import DecoderModel, DecoderSpec, decoder_network
from jaxattn.models.blocks import MLA, Block, MoE, Stream
from jaxattn.ops.moe_route import Router
from jaxattn.parallel import Parallel
from tests.parallel.cases import Sizes, Stepped

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs"),
]

LATENT = MLA(
    num_heads=16,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope=RopeConfig(dim=64),
)
EXPERTS = MoE(expert_size=512, router=Router(experts=8, top_k=4, scores="softmax"), shared_size=512)
STEPS = 5


def model() -> DecoderModel:
    stream = Stream(hidden_size=1024, eps=1e-6, dtype="bfloat16", param_dtype="bfloat16")
    blocks = (Block(LATENT, EXPERTS),) * 3
    spec = DecoderSpec(vocab_size=2048, stream=stream, blocks=blocks, max_position_embeddings=1024)
    return DecoderModel(spec).with_fused_sums(8)


@pytest.mark.parametrize("layout", [dict(tensor=2), dict(data=2, expert=2)], ids=str)
def test_one_token_without_a_loop_gives_the_bits_of_one_with_it(layout, monkeypatch):
    parallel = Parallel(**layout)
    sizes, found = Sizes(lengths=(1,) * parallel.data, page=64, table=2), []
    for repeats in (99, 1):
        monkeypatch.setattr(decoder_network, "MANY_REPEATS", repeats)
        steps = Stepped(model(), parallel, sizes)
        check_aliasing(steps.compiled_decode, slack=4096)
        text = steps.compiled_decode.as_text()
        random, tokens = np.random.default_rng(2), []
        for length in range(1, STEPS + 1):
            given = random.integers(0, 2048, parallel.data)
            tokens.append(steps.decode(given, np.full(parallel.data, length)))
        caches = {name: each for name, each in steps.state.caches.items() if name != "mailbox"}
        written = [np.asarray(x, np.float32) for x in jax.tree.leaves(caches)]
        found.append((text.count("sum_over_gpus"), np.array(tokens), written))
    assert found[1][0] > found[0][0]
    np.testing.assert_array_equal(found[1][1], found[0][1])
    for one, other in zip(found[1][2], found[0][2], strict=True):
        assert np.isfinite(one).all() and one.any()
        np.testing.assert_array_equal(one, other)
