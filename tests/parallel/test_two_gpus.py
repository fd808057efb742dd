"""On two GPUs, with the kernels: bfloat16 logits near those of one GPU, and steps in place.

    python -m pytest -m gpu -p no:xdist -s tests/parallel/test_two_gpus.py -k "latents and tensor"

Rows are fed token by token, so that each layout compiles one step alone. The steps of all tests
that were selected compile at a time, and those of no other. The experts are all chosen by every
token: where a choice flips, outputs differ by more than rounding.
"""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxattn import check_aliasing
from jaxattn.core.rope import RopeConfig
from jaxattn.models import DecoderModel, DecoderSpec
from jaxattn.models.base import jit_step
from jaxattn.models.blocks import GDN, GQA, MLA, MLP, Block, MoE, Stream
from jaxattn.ops.moe_route import Router
from jaxattn.parallel import ALONE, Group, Parallel
from jaxattn.parallel.compiled import all_reduces
from tests.parallel.cases import Sizes, Stepped, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs"),
]

# Rows end together. With `context` a row has pages on both GPUs from 65 tokens on.
SIZES = Sizes(lengths=(150, 70, 128, 65, 140, 20, 130, 129), page=64, table=4)
FREE = 4  # steps of each row's own tokens after those that are given
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


def decoder(*blocks: Block) -> DecoderModel:
    stream = Stream(hidden_size=1024, eps=1e-6, dtype="bfloat16", param_dtype="bfloat16")
    return DecoderModel(
        DecoderSpec(vocab_size=2048, stream=stream, blocks=blocks, max_position_embeddings=4096)
    )


LATENTS = decoder(Block(LATENT, MLP(intermediate_size=1024)), Block(DELTA, EXPERTS))
KEYS = decoder(Block(GROUPED, EXPERTS))
TENSOR, CONTEXT, DATA = (
    Parallel(tensor=2),
    Parallel(tensor=2, context=2),
    Parallel(data=2, expert=2),
)
CASES = {
    "latents, tensor": (LATENTS, TENSOR),
    "latents, context": (LATENTS, CONTEXT),
    "latents, data and expert": (LATENTS, DATA),
    "keys and values, context": (KEYS, CONTEXT),
}
# XLA's own choice of what is recorded, and collectives.
IN_GRAPHS = {
    "xla_gpu_enable_command_buffer": "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
    "DYNAMIC_SLICE_FUSION,FUSION,COLLECTIVES"
}


class Fed(Stepped):
    """A layout's decode step: (each row's likeliest token, its logits) after one more token."""

    def __init__(self, model: DecoderModel, layout: Parallel):
        super().__init__(model, layout, SIZES)
        self.whole = model
        step: Any = self._with_logits
        if layout.gpus > 1:
            group = Group(layout, tuple(jax.devices()[: layout.gpus]))
            columns = PartitionSpec(layout.axes("data") or None, layout.axes("tensor") or None)
            specs = (self.model.packed_specs(), self.model.state_specs(), group.rows)
            step = group.step(step, specs, ((group.rows, columns), specs[1]))
        batch = self.decode_batch(np.zeros(self.rows, np.int32), np.array(SIZES.lengths))
        begin = time.perf_counter()
        self._lowered = jit_step(step).lower(self.params, self.state, batch)
        self.say("traced", begin)
        self.compiled = self.compile()

    def compile(self, options: dict[str, str] | None = None) -> Any:
        begin = time.perf_counter()
        compiled = self._lowered.compile(options)
        self.say("compiled", begin)
        return compiled

    def say(self, what: str, begin: float) -> None:
        spent = time.perf_counter() - begin
        print(f"{self.parallel.flags or 'one GPU'}: {what} in {spent:.0f} s", flush=True)

    def _with_logits(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        logits, state = self.model.decode(params, state, batch)
        return (self.model.vocabulary.best(logits)[0], logits), state

    def fed(self, compiled: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, logits [rows, vocabulary]) of the steps behind the given tokens, in order."""
        texts, longest, seen = prompts(self.whole, SIZES), max(SIZES.lengths), []
        tokens = np.zeros(self.rows, np.int32)
        for step in range(longest + FREE):
            at = step - longest + np.array(SIZES.lengths)  # in each row's text; not yet begun: < 0
            given = [
                text[i] if 0 <= i < len(text) else 0 for text, i in zip(texts, at, strict=True)
            ]
            batch = self.decode_batch(
                np.where(step < longest, given, tokens), np.where(at >= 0, at + 1, 0)
            )
            run = compiled or self.compiled
            (chosen, logits), self.state = run(self.params, self.state, batch)
            if step >= longest - 1:
                tokens = np.asarray(chosen)
                seen.append((tokens, np.asarray(logits)[:, : self.whole.vocab_size]))
        return np.array([each for each, _ in seen]), np.array([each for _, each in seen])


type Key = tuple[DecoderModel, Parallel]


class Steps:
    """Steps of layouts, made when they are asked for; threads make those of some cases before."""

    def __init__(self, pool: ThreadPoolExecutor, cases: Iterable[str]):
        self._pool = pool
        self._made: dict[Key, Future[Fed]] = {}
        self._alone: dict[DecoderModel, tuple[np.ndarray, np.ndarray]] = {}
        for case in cases:
            model, layout = CASES[case]
            self._begin((model, ALONE))
            self._begin((model, layout))

    def _begin(self, key: Key) -> Future[Fed]:
        if key not in self._made:
            self._made[key] = self._pool.submit(Fed, *key)
        return self._made[key]

    def __getitem__(self, key: Key) -> Fed:
        return self._begin(key).result()

    def both(self, one: Key, other: Key) -> tuple[Fed, Fed]:
        """Two of them, made at a time."""
        begun = self._begin(one), self._begin(other)
        return begun[0].result(), begun[1].result()

    def alone(self, model: DecoderModel) -> tuple[np.ndarray, np.ndarray]:
        """What one GPU gives."""
        if model not in self._alone:
            one = self[model, ALONE]
            self._alone[model] = one.fed()
        return self._alone[model]


@pytest.fixture(scope="module")
def steps(request) -> Iterator[Steps]:
    """Those of the selected tests. Each compiles for 15 s or more."""
    here = [item for item in request.session.items if item.module is request.module]
    given = [item.callspec.params for item in here if hasattr(item, "callspec")]
    cases = [params["case"] for params in given if "case" in params]
    with ThreadPoolExecutor(len(CASES) + 2) as pool:
        yield Steps(pool, cases)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_one_gpu_but_for_rounding_and_steps_are_in_place(steps, case):
    model, layout = CASES[case]
    tokens, expected = steps.alone(model)
    stepped = steps[model, layout]
    found_tokens, found = stepped.fed()
    before = addresses(stepped)
    np.testing.assert_array_equal(stepped.fed()[1], found)
    after = addresses(stepped)
    # The first logits are behind the same tokens; later ones are behind each layout's own.
    first = expected[0]
    difference = np.linalg.norm(found[0] - first, axis=-1) / np.linalg.norm(first, axis=-1)
    print(f"{case}: logits differ by {difference.max():.2e}, relative L2", flush=True)
    assert difference.max() < 3e-2
    assert (found_tokens[0] == tokens[0]).mean() >= 0.75
    assert_two_all_reduces_per_layer(model, layout, stepped.compiled)
    assert after == before


def test_all_reduces_in_command_buffers_give_the_same_bits(steps):
    """XLA's own kernel has a count of its runs, which a graph that is not renewed would repeat."""
    stepped = steps[CASES["latents, tensor"]]
    tokens, logits = stepped.fed()
    found_tokens, found = stepped.fed(stepped.compile(IN_GRAPHS))
    np.testing.assert_array_equal(found, logits)
    np.testing.assert_array_equal(found_tokens, tokens)


@pytest.mark.parametrize("layout", [TENSOR, DATA], ids=lambda layout: layout.flags)
def test_sums_in_one_launch_give_near_logits_and_leave_one_all_reduce(steps, layout):
    """Sums, residuals and norms of layers by a kernel; the last layer's sum is XLA's."""
    fused = LATENTS.with_fused_sums(len(SIZES.lengths))
    plain, stepped = steps.both((LATENTS, layout), (fused, layout))
    _, expected = plain.fed()
    _, found = stepped.fed()
    before = addresses(stepped)
    np.testing.assert_array_equal(stepped.fed()[1], found)
    difference = np.linalg.norm(found[0] - expected[0], axis=-1)
    difference /= np.linalg.norm(expected[0], axis=-1)
    print(f"one launch: logits differ by {difference.max():.2e}, relative L2", flush=True)
    assert difference.max() < 3e-2
    sums = [each for each in all_reduces(stepped.compiled.as_text()) if each.of_layers]
    assert len(sums) == 1
    check_aliasing(stepped.compiled)
    assert addresses(stepped) == before


def addresses(stepped: Stepped) -> list[int]:
    return [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(stepped.state)
        for shard in leaf.addressable_shards
    ]


def assert_two_all_reduces_per_layer(model: DecoderModel, layout: Parallel, compiled: Any) -> None:
    """Of the form that XLA's own kernel takes; and nothing donated is copied."""
    sums = [each for each in all_reduces(compiled.as_text()) if each.of_layers]
    blocks = model.spec.blocks
    experts = sum(block.feed_forward is EXPERTS for block in blocks)
    assert len(sums) == 2 * (experts if layout.data == 2 else len(blocks))
    assert all(each.serves for each in sums), sums
    # With a row's pages on both, what attention gives is rearranged once to be sent.
    sent = len(SIZES.lengths) * 16 * 512 * 2 if layout.context > 1 else 0
    check_aliasing(compiled, slack=sent)
