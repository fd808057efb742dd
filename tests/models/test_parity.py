"""Published checkpoints compute what transformers computes from them.

tests/data/tiny_checkpoints was written by transformers 5 with random weights, and holds its logits.
JAXATTN_TINY_CHECKPOINTS names a folder with more of them: `tests/helpers/make_checkpoints.py`
writes such. Where torch and transformers are installed, a few are written here.
"""

import dataclasses
import importlib.util
import json
import os
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.experimental import io_callback

from jaxattn import Engine, Limits, Request
from jaxattn.models import CacheSize, DecodeBatch, PrefillBatch
from jaxattn.models.blocks import Block, DeltaMixer, MoE, SparseMLA
from jaxattn.models.interface import init_state, scratch_spec
from jaxattn.models.loading import huggingface_checkpoint
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.registry import FAMILIES
from jaxattn.nn import moe as nn_moe
from jaxattn.ops.moe.router_logits import sum_split_logits
from jaxattn.ops.moe.routing import choose_experts

TINY = Path(__file__).parents[1] / "data" / "tiny_checkpoints"
MORE = os.environ.get("JAXATTN_TINY_CHECKPOINTS")
MADE = 20  # folders that are written here


# The same on a GPU, where bfloat16 goes through the kernels. What XLA alone computes is not asked
# of a GPU again: compiling is most of the time there, and 13 folders are to fit in ten minutes.
devices = pytest.mark.parametrize("device", ["any", pytest.param("gpu", marks=pytest.mark.gpu)])


def is_ours(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and json.loads(config.read_text())["model_type"] in FAMILIES


FOLDERS = {
    folder.name: folder
    for root in (TINY, *([Path(MORE)] if MORE else []))
    for folder in sorted(root.iterdir())
    if is_ours(folder)
}


@pytest.fixture(scope="module", params=[*FOLDERS, *range(MADE)])
def folder(request, tmp_path_factory) -> Path:
    if request.param in FOLDERS:
        return FOLDERS[request.param]
    for library in ("torch", "transformers"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed; it makes more checkpoints")
    from tests.helpers import checkpoint_variations, make_checkpoints

    made = tmp_path_factory.mktemp("made")
    make_checkpoints.write(checkpoint_variations.draw(request.param), made)
    return made


def of(
    *names: str | int,
    reason: str = "a family's layer that is read wrongly; found by logits of all folders in "
    "float32 too",
) -> pytest.MarkDecorator:
    """These folders; the others with --slow alone, and on a GPU."""
    each = [
        name if name in names else pytest.param(name, marks=pytest.mark.slow(reason=reason))
        for name in (*FOLDERS, *range(MADE))
    ]
    return pytest.mark.parametrize("folder", each, indirect=True)


@pytest.fixture(scope="module")
def loaded(folder):
    return huggingface_checkpoint.load(folder, dtype="float32")


@pytest.fixture(scope="module")
def wanted(folder) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(folder / "reference.safetensors")


def relative(actual, expected) -> float:
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def exactly(wanted, name: str) -> tuple[np.ndarray, float]:
    """(the reference's logits, how near ours must be): 1e-4, or where float64 ones are there, twice
    as far from them as transformers' own float32. Sums in another order are as far now and then.
    """
    exact = wanted.get(f"exact_{name}")
    if exact is None:
        return wanted[name], 1e-4
    return exact, max(1e-4, 2 * float(np.abs(wanted[name] - exact).max()))


# Folders whose mixers, feed-forwards and caches another folder has too. Whether their family reads
# its weights and its configuration right shows in the training forward, which compiles in a third
# of the time that steps take.
OF_SHARED_LAYERS = (
    "bailing_hybrid",
    "deepseek_v32",
    "glm4_moe",
    "glm_moe_dsa",
    "gpt_oss",
    "kimi_k2_int4",
    "minimax_m2",
    "ministral3",
    "mistral",
    "olmo3",
    "qwen2",
    "qwen3_5_moe",
    "qwen3_moe",
    "smollm3",
    "youtu",
)


@of(
    *(name for name in OF_SHARED_LAYERS if name != "glm_moe_dsa"),
    reason="a family's layer that is read wrongly; found by steps that give the reference logits "
    "there, and in test_sparse_attention, too",
)
def test_the_training_forward_gives_the_reference_logits(loaded, wanted):
    model, params = loaded
    logits = jax.jit(lambda tokens: model.bind(params)(tokens))(wanted["prompt"])
    expected, limit = exactly(wanted, "logits")
    for row, length in enumerate(wanted["lengths"]):
        np.testing.assert_allclose(
            logits[row, :length], expected[row, :length], atol=limit, rtol=1e-4
        )


def steps(model, params, wanted) -> tuple[np.ndarray, np.ndarray]:
    """The logits after the prompt, which is read in two chunks, and after each greedy token; ours
    and the reference's."""
    prompt, length = wanted["prompt"][0], wanted["lengths"][0]
    chunk = int(0.6 * length)
    state = init_state(model, CacheSize(pages=4, slots=2), scratch_spec(model, 1, max_pages=3))
    state = jax.device_put(state, jax.devices()[0])  # as what a step returns, for one program
    tables, slots = np.array([[2, 0, 3]], np.int32), np.array([1], np.int32)
    prefill, decode = jax.jit(model.prefill), jax.jit(model.decode)
    for begin, end in ((0, chunk), (chunk, length)):
        tokens = np.zeros((1, chunk), np.int32)
        tokens[0, : end - begin] = prompt[begin:end]
        lens = np.array([end - begin], np.int32), np.array([end], np.int32)
        logits, state = prefill(params, state, PrefillBatch(tokens, *lens, tables, slots))
    found, expected = [logits[0]], [wanted["logits"][0, length - 1], *wanted["step_logits"]]
    for step, token in enumerate(wanted["greedy"]):
        lens = np.array([length + 1 + step], np.int32)
        logits, state = decode(params, state, DecodeBatch(token[None, None], lens, tables, slots))
        found.append(logits[0])
    return np.stack(found), np.stack(expected)


class Choice(NamedTuple):
    """Of a call of a router.

    Attributes:
        experts: [T, K], in the order of their numbers; -1 for padding.
        scores: [T, E], by which they are chosen.
    """

    experts: np.ndarray
    scores: np.ndarray


class Run(NamedTuple):
    """Of `steps`: the logits, the reference's, and the choices of each call of a router."""

    found: np.ndarray
    expected: np.ndarray
    choices: list[Choice]

    @property
    def errors(self) -> np.ndarray:
        return np.array([relative(*pair) for pair in zip(self.found, self.expected, strict=True)])


def run(model, params, wanted, follow: Run | None = None) -> Run:
    """
    Args:
        follow: tokens take the experts of this run, whichever the model would choose.
    """
    calls: list[Choice] = []
    others = iter(follow.choices if follow else ())

    def recorded(logits, bias, router, *, halves=False, layer=None, **options):
        ids, weights, listed = choose_experts(
            logits, bias, router, halves=halves, layer=layer, **options
        )
        columns = (sum_split_logits(logits) if halves else logits)[:, : router.experts]
        sigmoid = router.scores == "sigmoid"
        scores = jax.nn.sigmoid(columns) if sigmoid else jax.nn.softmax(columns)
        own = 0 if bias is None else bias if layer is None else bias[layer.index]
        routed, always = jnp.split(ids, [router.top_k], axis=1)
        sorted_ids = jnp.sort(routed)
        jax.debug.callback(
            lambda *found: calls.append(Choice(*map(np.asarray, found))),
            sorted_ids,
            scores + own if sigmoid else columns,
            ordered=True,
        )
        if follow is None:
            return ids, weights, listed
        shape = jax.ShapeDtypeStruct(routed.shape, routed.dtype)
        taken = io_callback(lambda: next(others).experts, shape, ordered=True)
        of_taken = jnp.take_along_axis(scores, jnp.maximum(taken, 0), axis=1)
        if router.normalize:
            of_taken = of_taken / of_taken.sum(1, keepdims=True)
        same = (sorted_ids == taken).all(1, keepdims=True)
        weights = jnp.concatenate(
            [
                jnp.where(same, weights[:, : router.top_k], of_taken * router.scale),
                weights[:, router.top_k :],
            ],
            axis=1,
        )
        return jnp.concatenate([jnp.where(same, routed, taken), always], axis=1), weights, None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn_moe, "choose_experts", recorded)
        found, expected = steps(model, params, wanted)
        jax.effects_barrier()
    return Run(found, expected, calls)


@pytest.fixture(scope="module")
def exact(loaded, wanted) -> Run:
    return run(*loaded, wanted)


@devices
@of(
    *(
        name
        for name in (*FOLDERS, *range(MADE))
        if name not in (*OF_SHARED_LAYERS, "deepseek_v3_fp8")
    ),
    reason="a family's weights or scales that are read wrongly; found by the training forward "
    "or by qwen3_next_fp8 there, and steps of the same layers by other folders, too",
)
def test_prefill_in_chunks_and_decode_give_the_reference_logits(exact, device):
    np.testing.assert_allclose(exact.found, exact.expected, atol=1e-4, rtol=1e-4)


def every_expert(model: DecoderModel) -> DecoderModel:
    """The model whose tokens take all experts. They attend to all positions if layers share those
    of an indexer, as a near-tie then moves a token in several layers."""
    all_positions = shares_positions(model)

    def changed(block: Block) -> Block:
        if all_positions and isinstance(block.mixer, SparseMLA):
            block = dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, top_k=1024))
        kind = block.feed_forward
        if not isinstance(kind, MoE):
            return block
        router = dataclasses.replace(kind.router, top_k=kind.router.experts, groups=1, top_groups=1)
        return dataclasses.replace(block, feed_forward=dataclasses.replace(kind, router=router))

    return DecoderModel(
        dataclasses.replace(model.spec, blocks=tuple(map(changed, model.spec.blocks)))
    )


@of(
    reason="rounding of experts' products; found by DeepSeek-V3 in bfloat16 with the same experts "
    "and by float64 in kernels/moe too"
)
def test_bfloat16_is_near_the_reference_where_tokens_take_all_experts(loaded, wanted, folder):
    """Without a choice no near-tie of a router falls to another expert."""
    model, params = huggingface_checkpoint.load(folder)
    exact = steps(every_expert(loaded[0]), loaded[1], wanted)[0]
    found = steps(every_expert(model), params, wanted)[0]
    # A norm enlarges the rounding where a recurrent head's output is small.
    limit = 0.1 if recurrent(model) else 3e-2
    assert max(map(relative, found, exact)) < limit


@devices
@of("deepseek_v3")
def test_bfloat16_is_near_the_reference_with_the_same_experts(folder, wanted, exact, device):
    """A random router is often near a tie, and a token with another expert is far from the
    reference, as are tokens that attend to it. So all take the experts of the float32 run, and what
    the model itself chooses may differ in near-ties alone."""
    model, params = huggingface_checkpoint.load(folder)
    if recurrent(model):
        pytest.skip("what a recurrent state adds up of roundings has no such bound")
    if shares_positions(model):
        pytest.skip("a near-tie of an indexer moves a token in all layers that share its positions")
    found = run(model, params, wanted, follow=exact)
    assert found.errors.max() < 3e-2
    near = np.sort(found.expected, axis=-1)
    decided = near[:, -1] - near[:, -2] > 6e-2
    same = found.found.argmax(-1) == found.expected.argmax(-1)
    assert same[decided].all()
    for ours, theirs in zip(found.choices, exact.choices, strict=True):
        differ = (ours.experts != theirs.experts).any(-1)
        assert not differ[nearest_choice(theirs) > 0.25].any()


def nearest_choice(choice: Choice) -> np.ndarray:
    """How much worse the best expert is that a token did not take than the worst one that it took,
    in standard deviations of its scores; 0 where groups of experts were chosen first."""
    tokens, experts = choice.scores.shape
    taken = np.zeros((tokens, experts), bool)
    np.put_along_axis(taken, np.maximum(choice.experts, 0), True, axis=1)
    if taken.all(1).any():
        return np.full(tokens, np.inf)
    worst = np.where(taken, choice.scores, np.inf).min(1)
    gap = worst - np.where(taken, -np.inf, choice.scores).max(1)
    return np.maximum(gap, 0) / choice.scores.std(1)


def shares_positions(model: DecoderModel) -> bool:
    mixers = [block.mixer for block in model.spec.blocks]
    return any(isinstance(mixer, SparseMLA) and mixer.shares_indices for mixer in mixers)


def recurrent(model: DecoderModel) -> bool:
    return any(isinstance(block.mixer, DeltaMixer) for block in model.spec.blocks)


@pytest.mark.slow(
    reason="a family's layer that is read wrongly; found by logits of all folders and the "
    "command's tokens of one too"
)
@devices
@of("qwen3_next_fp8")  # the command's test has deepseek_v3
def test_the_engine_writes_the_reference_tokens(loaded, wanted, device):
    model, params = loaded
    request = Request(wanted["prompt"][0], max_tokens=len(wanted["greedy"]))
    limits = Limits(batch=1, max_model_len=128, prefill_chunk=32)
    with Engine(model, params, limits) as engine:
        [done] = engine.generate([request])
    assert done.finish_reason == "length", (done.finish_reason, done.detail)
    assert list(done.tokens) == wanted["greedy"].tolist()
