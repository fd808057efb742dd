"""An engine over several devices: the same tokens as on one, each device's plan, nothing new."""

import dataclasses
import functools
from unittest import mock

import jax
import numpy as np
import pytest

from jaxattn import Engine, Limits, Request, check_aliasing
from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.engine.startup.engine_build import prepare
from jaxattn.models import DecoderModel, Hybrid, HybridConfig
from jaxattn.parallel import Parallel
from jaxattn.parallel.hlo_all_reduces import all_reduces
from tests.helpers.lazy_steps import is_lazy, use_lazy_steps
from tests.helpers.virtual_devices import on_virtual_devices

pytestmark = pytest.mark.lazy_steps

CONFIG = HybridConfig(
    vocab_size=251,
    hidden_size=32,
    intermediate_size=48,
    num_repeats=1,
    gdn_per_repeat=1,
    num_attention_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    rope=RopeConfig(dim=8),
    linear_num_key_heads=1,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    max_position_embeddings=512,
    dtype="float32",
    param_dtype="float32",
    tie_embeddings=True,
)
LIMITS = Limits(batch=4, max_model_len=512, prefill_chunk=64, decode_buckets=(2,), checkpoints=2)
LAYOUT = Parallel(tensor=4, context=2)


def requests() -> list[Request]:
    """Greedy ones and others, longer than a page and than two; some leave a bucket early."""
    found = []
    for number, length in enumerate((20, 150, 70, 100, 5)):
        prompt = [(7 * number + 3 * at) % 251 for at in range(length)]
        controls = [
            {},
            {},
            {"temperature": 0.9},
            {"temperature": 1.1, "top_k": 9, "top_p": 0.8},
            {},
        ]
        found.append(Request(prompt, max_tokens=6 + 2 * number, seed=number, **controls[number]))
    return found


@functools.cache
def params():
    """NumPy's: what each device has of them is sliced without compiling."""
    return jax.tree.map(np.asarray, Hybrid(CONFIG).init_params(jax.random.key(1)))


@functools.cache
def made(parallel: Parallel) -> tuple[Engine, int]:
    """An engine for all tests, and how often `decode` was traced for it. In the process that these
    tests share an engine takes some five seconds. One over a group compiles all steps ahead."""
    decode = DecoderModel.decode
    lazy = is_lazy()
    use_lazy_steps(lazy and parallel.gpus == 1)
    with mock.patch.object(DecoderModel, "decode", autospec=True, side_effect=decode) as traced:
        engine = Engine(
            Hybrid(CONFIG),
            params(),
            # One bucket of rows: a second has twice as many decode steps.
            dataclasses.replace(LIMITS, decode_buckets=()),
            implementation="xla",
            parallel=parallel,
            strict=True,
            workers=2,
        )
    use_lazy_steps(lazy)
    return engine, traced.call_count


def engine(parallel: Parallel) -> Engine:
    return made(parallel)[0]


# Each device has half of each row's pages, or the pages of half of the rows.
@pytest.mark.slow_cases(
    reason="a row's page in the other group's pool; found by an engine over four devices there "
    "and data groups in parallel/test_same_tokens too"
)
@pytest.mark.parametrize(
    "layout",
    [LAYOUT, pytest.param(Parallel(data=2, tensor=2), marks=pytest.mark.slow)],
    ids=lambda layout: layout.flags,
)
@on_virtual_devices
def test_an_engine_gives_the_tokens_of_one_device_and_makes_no_buffer(layout):
    one, group = engine(Parallel()), engine(layout)
    expected = [each.tokens for each in one.generate(requests())]
    assert [each.tokens for each in group.generate(requests())] == expected
    assert_scores_alike(one, group)
    assert not group.seal.counts
    assert group.plan["kv cache"] == one.plan["kv cache"] // 2
    assert_in_place(group)


def assert_scores_alike(one: Engine, group: Engine) -> None:
    """Each device has the logits of a part of the tokens, and of rows of a part."""
    texts = [each.prompt for each in requests()][:3]
    for wanted, found in zip(one.score(texts, top=2), group.score(texts, top=2), strict=True):
        assert len(wanted) == len(found) and found[0] is None
        for own, other in zip(wanted[1:], found[1:], strict=True):
            assert other.token == pytest.approx(own.token, abs=0.05)
            assert other.top[0][1] == pytest.approx(own.top[0][1], abs=0.05)
    for pooling in ("mean", "last"):
        wanted, found = (each.embed(texts, pooling=pooling) for each in (one, group))
        np.testing.assert_allclose(found, wanted, atol=0.05 * np.abs(wanted).max())


def assert_in_place(group: Engine) -> None:
    """Nothing donated is copied, no greedy or drawing step gathers logits, and the sums of layers
    are of the form that XLA's own kernel takes, in each bucket."""
    for name, compiled in group.executables.items():
        if name.startswith(("prefill", "decode", "round")):
            sums = [each for each in all_reduces(compiled.as_text()) if each.of_layers]
            # Two of each of two layers, and the embedding's.
            assert len(sums) == 5 and all(each.serves for each in sums), name
        if name.startswith("decode"):
            check_aliasing(compiled, slack=16384)
        if name.endswith((": greedy", ": draws")):
            gathered = [x for x in compiled.as_text().splitlines() if " all-gather(" in x]
            columns = group.model.logit_columns
            assert not any(f",{columns}]" in line for line in gathered), name


@on_virtual_devices
def test_a_layout_that_has_no_devices_or_no_heads_is_refused_before_anything_is_placed():
    model = Hybrid(CONFIG)
    shapes = model.param_shapes()
    with pytest.raises(ValueError, match="tensor=3 does not divide the 4 value heads"):
        prepare(model, shapes, LIMITS, parallel=Parallel(tensor=3))
    with pytest.raises(ValueError, match="needs 4 GPUs, but 2 devices were given"):
        prepare(model, shapes, LIMITS, jax.devices()[:2], parallel=LAYOUT)
    other = dataclasses.replace(CONFIG, hidden_size=48)
    with pytest.raises(ValueError, match="parameter"):
        prepare(model, Hybrid(other).param_shapes(), LIMITS, parallel=LAYOUT)


@on_virtual_devices
def test_parameters_on_another_device_are_named_before_anything_is_compiled():
    one, other = jax.devices()[:2]
    elsewhere = jax.device_put(params(), other)
    with pytest.raises(ValueError, match=r"parameter 'embedding.* is on .*1, but the engine"):
        Engine(
            Hybrid(CONFIG),
            elsewhere,
            LIMITS,
            one,
            on_compile=lambda name, seconds: pytest.fail("compiled"),
        )


@on_virtual_devices
def test_each_device_holds_its_share_alone():
    group = engine(LAYOUT)
    held = {
        device: sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(group.state)
            for shard in leaf.addressable_shards
            if shard.device == device
        )
        for device in jax.devices()[:4]
    }
    lines = ("arena", "kv cache", "conv state", "ssm state")
    assert set(held.values()) == {sum(group.plan[line] for line in lines)}
    states = group.state.array("ssm_state")
    assert states.sharding.shard_shape(states.shape)[2] == 1, "one of four heads"
    assert len(np.unique([id(device) for device in held])) == 4


@on_virtual_devices
def test_new_weights_over_a_group_are_those_of_one_device():
    """What a strict engine was not compiled for is refused before anything is changed."""
    one, group, asked = engine(Parallel()), engine(LAYOUT), requests()[1:4]
    before = [each.tokens for each in group.generate(asked)]
    other = jax.tree.map(lambda x: x[..., ::-1].copy(), params())
    with pytest.raises(ValueError, match=r"parameter 'norm.weight' with .*expect_updates"):
        group.update(other)
    assert [each.tokens for each in group.generate(asked)] == before
    group.expect_updates(other)
    for tree in (other, params()):
        found = []
        for each in (one, group):
            each.update(tree)
            found.append([done.tokens for done in each.generate(asked)])
            assert not each.seal.counts
        assert found[0] == found[1] and (found[0] == before) == (tree is not other)
    lines = ("arena", "rows", "kv cache", "conv state", "ssm state")
    assert group.release() == sum(group.plan[line] for line in lines)
    group.resume()
    assert [each.tokens for each in group.generate(asked)] == before


class Odd:
    """A grammar of odd tokens: three of them."""

    def __init__(self):
        self.left = 3

    def mask(self, words):
        words[:] = np.uint32(0xAAAAAAAA).view(np.int32)

    def accept(self, token):
        self.left -= 1
        return self.left > 0


@on_virtual_devices
def test_prefixes_and_grammars_are_those_of_one_device():
    prompt = [(3 * at + 1) % 251 for at in range(150)]
    asked = [Request(prompt, max_tokens=5), Request([*prompt[:140], 9], max_tokens=5)]

    def served(engine):
        done = [engine.generate([each])[0] for each in asked]
        done += engine.generate([Request([7] * 9, grammar=Odd())])
        assert not engine.seal.counts
        return done

    one, group = served(engine(Parallel())), served(engine(LAYOUT))
    assert [each.tokens for each in group] == [each.tokens for each in one]
    # A page over two devices has 128 tokens, and so has a block.
    assert [each.cached_tokens for each in group] == [0, 128, 0]
    assert len(group[2].tokens) == 3 and all(token % 2 for token in group[2].tokens)


@on_virtual_devices
def test_a_decode_step_is_traced_once_for_all_executables_that_hold_it():
    engine, traces = made(LAYOUT)
    # Alone, and in rounds with two ways to choose.
    assert sum(name.startswith(("decode", "round")) for name in engine.executables) == 3
    assert traces == 1, traces
