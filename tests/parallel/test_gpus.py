"""On several GPUs, with the kernels: bfloat16 logits near those of one GPU, and steps in place.

    python -m pytest -m gpu -p no:xdist -s tests/parallel/test_gpus.py -k "latents and tensor"

There are cases of 2, 4 and 8 GPUs. Those of more GPUs than there are say so and are skipped.

Rows are fed token by token, so that each layout compiles one step alone. All steps of the selected
cases compile before the first test, and those of no other. A process for each case compiles in a
third of the time: kernels are lowered one at a time in a process. The experts are all chosen by
every token: where a choice flips, outputs differ by more than rounding.
"""

import dataclasses
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxattn import check_aliasing
from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.models import DecoderModel, DecoderSpec
from jaxattn.models.blocks import GDN, GQA, MLA, MLP, Block, MoE, SparseMLA, Stream
from jaxattn.models.interface import GRAPHS, RECORDED, jit_step
from jaxattn.ops.moe.routing import Router
from jaxattn.parallel import ALONE, DeviceGroup, Parallel
from jaxattn.parallel.hlo_all_reduces import all_reduces
from tests.parallel.cases import Sizes, Stepped, drawn_params, prompts

GPUS = jax.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
]

# Rows end together. The first has a token on each of the most GPUs that there are cases of, and one
# more on the first: with `context` its pages are on all of them.
PAGE = 64
MOST = next((most for most in (8, 4) if most <= GPUS), 2)
LONGEST = 150 if MOST == 2 else PAGE * MOST + 22
SIZES = Sizes(
    lengths=(LONGEST, 70, 128, 65, 140, 20, 130, 129), page=PAGE, table=LONGEST // PAGE + 2
)
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
SPARSE = SparseMLA(
    **{each.name: getattr(LATENT, each.name) for each in dataclasses.fields(LATENT)}
    | {"q_lora_rank": 512, "cache_dtype": "uint8"},
    top_k=512,
    index_heads=32,
)
DELTA = GDN(num_k_heads=4, num_v_heads=8)
GROUPED = GQA(num_heads=16, num_kv_heads=2, head_dim=128, rope=ROPE, qk_norm=True, gated=True)
EXPERTS = MoE(
    expert_size=512,
    router=Router(experts=8, top_k=8, scores="softmax"),
    shared_size=512,
)


def decoder(*blocks: Block) -> DecoderModel:
    stream = Stream(hidden_size=1024, eps=1e-6, dtype="bfloat16", param_dtype="bfloat16")
    return DecoderModel(
        DecoderSpec(vocab_size=2048, stream=stream, blocks=blocks, max_position_embeddings=4096)
    ).with_fused_sums(0)


LATENTS = decoder(Block(LATENT, MLP(intermediate_size=1024)), Block(DELTA, EXPERTS))
KEYS = decoder(Block(GROUPED, EXPERTS))
# One layer: where an input differs by rounding, so may a choice.
CHOSEN = decoder(Block(SPARSE, MLP(intermediate_size=1024)))
type Key = tuple[DecoderModel, Parallel]

FUSED = LATENTS.with_fused_sums(len(SIZES.lengths))
MODELS = {"latents": LATENTS, "keys and values": KEYS, "chosen": CHOSEN, "one launch": FUSED}


def cases() -> dict[str, tuple[Key, Key]]:
    """What a layout's step is compared with, and the step."""
    layouts = {
        "latents": [
            dict(tensor=2),
            dict(tensor=2, context=2),
            dict(data=2, expert=2),
            dict(tensor=4),
            dict(tensor=4, context=4),
            dict(tensor=4, context=2),
            dict(data=2, tensor=2, expert=4),
            dict(data=4, expert=4),
            dict(tensor=8),
            dict(tensor=8, context=8),
            dict(data=2, tensor=4, context=2, expert=8),
            dict(data=8, expert=8),
        ],
        "keys and values": [
            dict(tensor=2, context=2),
            dict(tensor=4, context=2),
            dict(data=2, tensor=2, context=2, expert=4),
            dict(tensor=8, context=4),
        ],
        "chosen": [
            dict(tensor=2, context=2),
            dict(tensor=4, context=2),
            dict(tensor=8, context=8),
        ],
        "one launch": [
            dict(tensor=2),
            dict(data=2, expert=2),
            dict(tensor=2, context=2),
            dict(tensor=4),
            dict(tensor=4, context=4),
            dict(data=4, expert=4),
            dict(tensor=8),
            dict(data=8, expert=8),
        ],
    }
    found = {}
    for name, each in layouts.items():
        for layout in each:
            parallel = Parallel(**layout)
            beside = (LATENTS, parallel) if name == "one launch" else (MODELS[name], ALONE)
            found[f"{name}, {parallel.gpus} GPUs: {words(layout)}"] = (
                beside,
                (MODELS[name], parallel),
            )
    return found


def words(layout: dict[str, int]) -> str:
    return " and ".join(f"{name} {size}" for name, size in layout.items())


CASES = cases()
# XLA's own choice of what is recorded, and collectives.
IN_GRAPHS = {GRAPHS: ",".join([*RECORDED[: RECORDED.index("WHILE")], "COLLECTIVES"])}


class Fed(Stepped):
    """A layout's decode step: (each row's likeliest token, its logits) after one more token."""

    def __init__(self, model: DecoderModel, layout: Parallel):
        super().__init__(model, layout, SIZES, random_params(model))
        self.whole = model
        step, out = self._with_logits, None
        if layout.gpus > 1:
            group = DeviceGroup(layout, tuple(jax.devices()[: layout.gpus]))
            columns = PartitionSpec(layout.axes("data") or None, layout.axes("tensor") or None)
            specs = (self.model.packed_specs(), self.model.state_specs(), group.rows)
            out_specs = (group.rows, columns), specs[1]
            step, out = group.step(step, specs, out_specs), group.shardings(out_specs)
        batch = self.decode_batch(np.zeros(self.rows, np.int32), np.array(SIZES.lengths))
        begin = time.perf_counter()
        self._lowered = jit_step(step, out_shardings=out).lower(self.params, self.state, batch)
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


def random_params(model: DecoderModel) -> Any:
    """The same for a model with sums in one launch."""
    return drawn_params(LATENTS if model is FUSED else model)


class Steps:
    """The steps of cases, compiled at a time, and what those fed that others are compared with."""

    def __init__(self, cases: list[str]):
        keys = dict.fromkeys(key for case in cases for key in CASES[case])
        with ThreadPoolExecutor(len(keys) or 1) as pool:
            made = pool.map(lambda key: Fed(*key), keys)
            self._made = dict(zip(keys, made, strict=True))
        self._wanted: dict[Key, tuple[np.ndarray, np.ndarray]] = {}

    def __getitem__(self, key: Key) -> Fed:
        return self._made[key]

    def wanted(self, key: Key) -> tuple[np.ndarray, np.ndarray]:
        if key not in self._wanted:
            self._wanted[key] = self[key].fed()
        return self._wanted[key]


@pytest.fixture(scope="module")
def steps(request) -> Steps:
    """Those of the selected tests. Each compiles for 15 s or more."""
    here = [item for item in request.session.items if item.module is request.module]
    selected = [item.callspec.params["case"] for item in here]
    return Steps([case for case in selected if CASES[case][1][1].gpus <= GPUS])


def some(names: Iterable[str]) -> Any:
    """A test of each case, skipped where there are fewer GPUs."""

    def marks(gpus: int) -> Any:
        return pytest.mark.skipif(gpus > GPUS, reason=f"needs {gpus} GPUs")

    each = [pytest.param(name, marks=marks(CASES[name][1][1].gpus)) for name in names]
    return pytest.mark.parametrize("case", each)


@some(CASES)
def test_logits_are_those_of_one_gpu_but_for_rounding_and_steps_are_in_place(steps, case):
    """Or those of the plain step of as many GPUs, where sums are one launch."""
    beside, (model, layout) = CASES[case]
    tokens, expected = steps.wanted(beside)
    stepped = steps[model, layout]
    found_tokens, found = stepped.fed()
    before = addresses(stepped)
    np.testing.assert_array_equal(stepped.fed()[1], found)
    after = addresses(stepped)
    # The first logits are behind the same tokens; later ones are behind each layout's own.
    first = expected[0]
    difference = np.linalg.norm(found[0] - first, axis=-1) / np.linalg.norm(first, axis=-1)
    print(f"{case}: logits differ by {difference.max():.2e}, relative L2", flush=True)
    print(f"{case}: {(found_tokens == tokens).mean():.3f} of the tokens are the same", flush=True)
    assert difference.max() < 3e-2
    assert (found_tokens[0] == tokens[0]).mean() >= 0.75
    sums = [each for each in all_reduces(stepped.compiled.as_text()) if each.of_layers]
    assert len(sums) == all_reduces_of(model, layout)
    assert all(each.serves for each in sums), sums
    check_aliasing(stepped.compiled, slack=taken_apart(layout))
    assert after == before


@some(name for name in CASES if name.startswith("latents") and name[-8:-1] == "tensor ")
def test_all_reduces_in_command_buffers_give_the_same_bits(steps, case):
    """XLA's own kernel has a count of its runs, which a graph that is not renewed would repeat."""
    stepped = steps[CASES[case][1]]
    tokens, logits = stepped.fed()
    found_tokens, found = stepped.fed(stepped.compile(IN_GRAPHS))
    np.testing.assert_array_equal(found, logits)
    np.testing.assert_array_equal(found_tokens, tokens)


def taken_apart(layout: Parallel) -> int:
    """Bytes of what attention gives, which is in the arena, where it is no copy of state.

    With a row's pages on several GPUs it is rearranged once to be sent. Of fewer heads than eight
    it is cut out of the room of eight.
    """
    own = LATENT.num_heads // layout.tensor
    sent = LATENT.num_heads if layout.context > 1 else own if own < 8 else 0
    rows = len(SIZES.lengths)
    return rows * sent * LATENT.kv_lora_rank * 2


def addresses(stepped: Stepped) -> list[int]:
    return [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(stepped.state)
        for shard in leaf.addressable_shards
    ]


def all_reduces_of(model: DecoderModel, layout: Parallel) -> int:
    """Two of each layer, three where tokens of data groups meet; two of layers with experts where a
    group is one GPU; in one launch all but the last."""
    if model is FUSED:
        return 1
    blocks = model.spec.blocks
    experts = sum(block.feed_forward is EXPERTS for block in blocks)
    found = 2 * len(blocks) if layout.tensor > 1 else 0
    # Tokens meet before experts of all groups, and their parts after them.
    met = experts if layout.tensor > 1 else 2 * experts
    return found + (met if layout.experts_meet else 0)
