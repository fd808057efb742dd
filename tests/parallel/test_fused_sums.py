"""Layers' outputs that are summed where the next norm is: the same step, in other launches.

On a CPU XLA's form of `all_reduce_norm_layer` runs, which rounds as the plain step does. The kernel
runs in tests/parallel/test_gpus.py.
"""

import dataclasses
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import Engine, Limits, Request, check_aliasing
from jaxattn.engine.compilation.sharded_step import arguments, jitted_step
from jaxattn.engine.startup import engine_build
from jaxattn.engine.startup.memory_plan import packed_shapes
from jaxattn.engine.steps.model_steps import ModelStep
from jaxattn.models import CacheSize, DecoderModel, Hybrid, divided
from jaxattn.models.blocks import GQA
from jaxattn.models.caches.symmetric_memory import EXCHANGE, MEETING, NAME
from jaxattn.models.network import decoder_network
from jaxattn.parallel import DeviceGroup, Parallel, context_parallel
from jaxattn.parallel.hlo_all_reduces import all_reduces
from tests.helpers.virtual_devices import on_virtual_devices
from tests.parallel.cases import LATENT, ROPE, SMALL, Stepped, decoder, followed
from tests.parallel.test_engine import CONFIG, LIMITS

LAYERS = (("mla", "moe"), ("gdn", "mlp"), ("mla", "wide"))
ROWS = len(SMALL.lengths)
# Heads of two GPUs whose queries are a multiple of 256 numbers.
WIDE = dataclasses.replace(LATENT, kv_lora_rank=56)
GROUPED = GQA(num_heads=8, num_kv_heads=2, head_dim=64, rope=ROPE)
MANY = GQA(num_heads=16, num_kv_heads=2, head_dim=64, rope=ROPE)


def plain(
    dtype: str = "bfloat16", hidden: int = 256, layers: tuple[tuple[str, str], ...] = LAYERS
) -> DecoderModel:
    model = decoder(*layers, dtype=dtype)
    stream = dataclasses.replace(model.spec.stream, hidden_size=hidden)
    return DecoderModel(dataclasses.replace(model.spec, stream=stream)).with_fused_sums(0)


@pytest.mark.slow(
    reason="a sum of another layer or a cut of another axis; found by rows that meet over their "
    "pages, which have a delta net and two of these feed-forwards, and by latents of data groups, "
    "which have the third, too"
)
@pytest.mark.parametrize(
    "layout",
    [
        dict(tensor=2),
        dict(tensor=4, context=2, expert=2),
    ],
    ids=str,
)
@on_virtual_devices
def test_a_step_gives_the_same_bits(layout):
    model, parallel = plain(), Parallel(**layout)
    tokens, logits = followed(model, parallel)
    fused = Stepped(model.with_fused_sums(ROWS), parallel)
    assert fused.state.caches[NAME]["peer_inbox"].shape[1:] == (parallel.tensor, ROWS, 256)
    found, found_logits = followed(model, parallel, steps=fused)
    np.testing.assert_array_equal(found_logits, logits)
    np.testing.assert_array_equal(found, tokens)


@pytest.mark.slow_cases(
    reason="a piece in another place; found by rows that meet in two pieces, and both on two "
    "GPUs too"
)
@pytest.mark.parametrize(
    "mixer, pieces",
    [
        pytest.param(WIDE, (1, 512), marks=pytest.mark.slow),
        (MANY, (2, 512)),
        pytest.param(GROUPED, (1, 512), marks=pytest.mark.slow),
    ],
)
@on_virtual_devices
def test_rows_that_meet_over_their_pages_give_the_same_bits(mixer, pieces, monkeypatch):
    """Queries and outputs are sent in pieces of as many numbers as a launch sends."""
    monkeypatch.setattr(context_parallel, "WIDEST", pieces[1])
    parallel = Parallel(tensor=2, context=2)
    spec = plain(layers=LAYERS[1:]).spec
    blocks = tuple(
        dataclasses.replace(block, mixer=mixer) if block.mixer.cache_name == "latents" else block
        for block in spec.blocks
    )
    model = DecoderModel(dataclasses.replace(spec, blocks=blocks))
    tokens, logits = followed(model, parallel)
    fused = Stepped(model.with_fused_sums(ROWS), parallel)
    assert fused.model.spec.exchanged_in == pieces
    inbox = fused.state.caches[EXCHANGE]["exchange_inbox"]
    assert inbox.shape[1:] == (2, ROWS * pieces[0], pieces[1])
    # Outputs of latents meet where rows are few.
    assert (MEETING in fused.state.caches) == (mixer.cache_name == "latents")
    found, found_logits = followed(model, parallel, steps=fused)
    np.testing.assert_array_equal(found_logits, logits)
    np.testing.assert_array_equal(found, tokens)


@pytest.mark.slow(
    reason="a token of another data group; found by repeats in one turn there and by layouts with "
    "experts over data groups in parallel/test_same_tokens too"
)
@on_virtual_devices
def test_tokens_of_data_groups_that_meet_at_experts_give_the_same_bits():
    model, parallel = plain(layers=(("mla", "moe"), ("mla", "wide"))), Parallel(data=4, expert=4)
    tokens, logits = followed(model, parallel)
    fused = Stepped(model.with_fused_sums(ROWS), parallel)
    assert fused.state.caches[NAME]["peer_inbox"].shape[1:] == (4, ROWS, 256)
    found, found_logits = followed(model, parallel, steps=fused)
    np.testing.assert_array_equal(found_logits, logits)
    np.testing.assert_array_equal(found, tokens)


@on_virtual_devices
def test_repeats_in_one_turn_give_the_same_bits_and_copy_no_state():
    model = plain(layers=(("mla", "mlp"), *(("mla", "moe"),) * 4)).with_fused_sums(ROWS)
    found = []
    for most in (1, 2):
        with mock.patch.object(decoder_network, "MOST_TOGETHER", most):
            steps = Stepped(model, Parallel(data=2, expert=2))
            tokens, logits = followed(model, steps.parallel, steps=steps)
            text = steps.compiled_decode.as_text()
        check_aliasing(steps.compiled_decode, slack=4096)
        found.append((tokens, logits, text.count(" while("), text.count(" dot(")))
    one, two = found
    assert one[2] == two[2] and one[3] < two[3]  # products of one turn
    np.testing.assert_array_equal(two[1], one[1])
    np.testing.assert_array_equal(two[0], one[0])


@pytest.mark.slow(
    reason="a sum of another layer; found by experts of both kinds over data groups too"
)
@on_virtual_devices
def test_a_dense_layer_of_data_groups_is_rounded_once_more():
    """What it adds is sent as the others' is, though no other GPU adds to it."""
    model, parallel = plain(layers=(("mla", "mlp"), ("mla", "moe"))), Parallel(data=2, expert=2)
    steps = [Stepped(each, parallel) for each in (model, model.with_fused_sums(ROWS))]
    plain_tokens, fused_tokens = (followed(model, parallel, steps=each)[0] for each in steps)
    assert (plain_tokens == fused_tokens).mean() > 0.8


@on_virtual_devices
def test_a_layer_still_has_two_sums_of_one_operand_and_nothing_is_copied():
    compiled = Stepped(plain().with_fused_sums(ROWS), Parallel(tensor=2)).compiled_decode
    sums = [each for each in all_reduces(compiled.as_text()) if each.of_layers]
    # Each norm has one, and what is behind the last layer.
    assert len(sums) == 2 * len(LAYERS)
    assert all(each.serves for each in sums), sums
    check_aliasing(compiled, slack=4096)


def test_only_layouts_and_dtypes_that_the_kernel_serves_have_a_mailbox():
    fused = plain().with_fused_sums(8)
    assert caches(fused, tensor=2) == {
        "peer_inbox": (2, 2, 8, 256),
        "peer_counts": (1, 8, 1),
        "peer_addresses": (3, 2),
    }
    assert not caches(fused)
    assert not caches(plain(), tensor=2)
    most = caches(plain().with_fused_sums(), tensor=8)["peer_inbox"]
    assert most == (2, 8, 256, 256)
    wide = plain(hidden=1024).with_fused_sums()
    assert caches(wide, tensor=8)["peer_inbox"] == (2, 8, 2**21 // (7 * 2048), 1024)
    assert caches(fused, data=2, expert=2)["peer_inbox"] == (2, 2, 8, 256)
    assert not caches(fused, data=2, tensor=2, expert=4)
    assert not caches(plain(dtype="float32").with_fused_sums(8), tensor=2)
    assert not caches(plain(hidden=384).with_fused_sums(8), tensor=2)


def caches(model: DecoderModel, **layout: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the mailbox's arrays."""
    found = {each.name: each for each in divided(model, Parallel(**layout)).caches}
    if NAME not in found:
        return {}
    shapes = found[NAME].shapes(CacheSize(pages=1, slots=1))
    assert shapes["peer_inbox"].dtype == jnp.int32
    return {name: shape.shape for name, shape in shapes.items()}


@on_virtual_devices
def test_logits_take_no_buffer_of_the_state_that_has_as_many_bytes():
    """XLA by itself gives a donated buffer to the first output of its size."""
    rows, parallel = 4, Parallel(tensor=2)
    whole = plain(layers=LAYERS[:1])
    columns = divided(whole, parallel).logit_columns
    # There are as many counts as a GPU has logits.
    model = divided(whole.with_fused_sums(rows * columns // 2), parallel)
    limits, entry = Limits(batch=rows, max_model_len=64), ModelStep("decode", rows, 1)
    shapes, group = packed_shapes(model), DeviceGroup(parallel, tuple(jax.devices()[:2]))
    tree = jax.tree.structure(shapes)
    jitted = jitted_step(entry, model, limits, tree, "xla", "cpu", group)
    given = arguments(entry, model, limits, shapes, group)
    head = jitted.lower(*given).compile().as_text().partition("entry_computation_layout=")[0]
    aliased = re.findall(r"\{(\d+)\}: \(", head.partition("input_output_alias=")[2])
    assert aliased == [str(1 + place) for place in range(len(jax.tree.leaves(given[1])))]


@pytest.mark.slow(
    reason="a mailbox that the plan leaves out; found by steps with the mailbox there and "
    "engines in parallel/test_engine too"
)
@on_virtual_devices
def test_an_engine_has_the_mailbox_in_its_plan_and_gives_the_same_tokens():
    """One bucket sums in a launch, and one has more rows than that.

    GPUs that do not reach each other's memory have none.
    """
    config = dataclasses.replace(
        CONFIG, hidden_size=256, dtype="bfloat16", param_dtype="bfloat16", tie_embeddings=False
    )
    model = Hybrid(config).with_fused_sums(0)
    params = jax.tree.map(np.asarray, model.init_params(jax.random.key(1)))
    limits = dataclasses.replace(LIMITS, batch=12, decode_buckets=(8,))
    asked = [Request([7 * at % 251 for at in range(n)], max_tokens=6) for n in (9, 70, 20)]
    found = {}
    for each in (model, model.with_fused_sums(8)):
        options = {"parallel": Parallel(tensor=2), "implementation": "xla", "workers": 2}
        with Engine(each, params, limits, strict=True, **options) as engine:
            found[each] = [done.tokens for done in engine.generate(asked)]
            assert not engine.seal.counts
            inbox = {item.name: item.nbytes for item in engine.plan.items}.get("peer inbox")
            assert inbox == (2 * 2 * 8 * 256 * 4 if each is not model else None)
    with mock.patch.object(engine_build, "peers_reach", lambda devices: False):
        apart = Engine(model.with_fused_sums(8), params, limits, **options)
    with apart:
        assert "peer inbox" not in {item.name for item in apart.plan.items}
    first, second = found.values()
    assert first == second
