"""On two GPUs, with the kernels: bfloat16 logits near those of one GPU, and steps in place.

The experts are all chosen by every token: where a choice flips, outputs differ by more than
rounding.
"""

import jax
import numpy as np
import pytest

from jaxattn import check_aliasing
from jaxattn.core.rope import RopeConfig
from jaxattn.models import DecoderModel, DecoderSpec
from jaxattn.models.blocks import GDN, GQA, MLA, MLP, Block, Mixer, MoE, Stream
from jaxattn.ops.moe import Router
from jaxattn.parallel import Parallel
from jaxattn.parallel.compiled import all_reduces
from tests.parallel.cases import Sizes, Stepped, followed, on_one_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs"),
]

SIZES = Sizes(lengths=(190, 70, 128, 65, 200, 20, 130, 255), chunk=128, page=64, table=6)
ROPE = RopeConfig(dim=64)
LATENT = MLA(
    num_heads=16,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope=ROPE,
)
DELTA = GDN(num_k_heads=4, num_v_heads=8)
GROUPED = GQA(num_heads=16, num_kv_heads=2, head_dim=128, rope=ROPE, qk_norm=True, gated=True)
EXPERTS = MoE(
    expert_size=256,
    router=Router(experts=4, top_k=4, scores="softmax"),
    shared_size=256,
)
DENSE = MLP(intermediate_size=1024)


def decoder(*mixers: Mixer) -> DecoderModel:
    blocks = tuple(Block(mixer, each) for mixer in mixers for each in (DENSE, EXPERTS, EXPERTS))
    stream = Stream(hidden_size=1024, eps=1e-6, dtype="bfloat16", param_dtype="bfloat16")
    return DecoderModel(
        DecoderSpec(vocab_size=2048, stream=stream, blocks=blocks, max_position_embeddings=4096)
    )


MODELS = {"latents": decoder(LATENT, DELTA), "keys and values": decoder(GROUPED, DELTA)}


CASES = [
    ("latents", Parallel(tensor=2)),
    ("latents", Parallel(tensor=2, context=2)),
    ("latents", Parallel(data=2, expert=2)),
    ("latents", Parallel(tensor=2, expert=2)),
    ("keys and values", Parallel(tensor=2)),
    ("keys and values", Parallel(tensor=2, context=2)),
    ("keys and values", Parallel(data=2, expert=2)),
]


def _name(value: object) -> str:
    return value.flags if isinstance(value, Parallel) else str(value)


@pytest.mark.parametrize("name, layout", CASES, ids=_name)
def test_logits_are_those_of_one_gpu_but_for_rounding_and_steps_are_in_place(name, layout):
    model = MODELS[name]
    tokens, expected = on_one_device(model, SIZES)
    stepped = Stepped(model, layout, SIZES)
    before = addresses(stepped)
    found_tokens, found = followed(model, layout, SIZES, stepped)
    assert addresses(stepped) == before
    difference = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    print(f"{name} {layout.flags}: logits differ by {difference.max():.2e}, relative L2")
    assert difference.max() < 3e-2
    assert (found_tokens[0] == tokens[0]).mean() >= 0.75
    assert_two_all_reduces_per_layer(model, layout, stepped)


def addresses(stepped: Stepped) -> list[int]:
    return [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(stepped.state)
        for shard in leaf.addressable_shards
    ]


def assert_two_all_reduces_per_layer(
    model: DecoderModel, layout: Parallel, stepped: Stepped
) -> None:
    """Of the form that XLA's own kernel takes; and nothing donated is copied."""
    compiled = stepped.compiled_decode
    sums = [each for each in all_reduces(compiled.as_text()) if each.of_layers]
    for each in sums:
        print(each)
    layers = sum(len(segment.pattern) for segment in model.spec.segments)
    experts = sum(b.feed_forward is EXPERTS for s in model.spec.segments for b in s.pattern)
    assert len(sums) == (2 * experts if layout.data == 2 else 2 * layers)
    assert all(each.serves for each in sums)
    # With a row's pages on both, what attention gives is rearranged once to be sent.
    sent = len(SIZES.lengths) * 16 * 512 * 2 if layout.context > 1 else 0
    check_aliasing(compiled, slack=sent)
