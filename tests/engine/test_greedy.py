"""Greedy text of the embedded model: whatever else is in the batch, and with kernel or reference.

Between implementations it is the same except at near-ties, where the two most likely bytes are
closer than the implementations' logits: what they differ by is measured here, in logits and states.
"""

import json

import jax
import numpy as np
import pytest

from jaxattn.cli.serve.default_prompts import PROMPTS
from jaxattn.engine.engine import Engine
from jaxattn.engine.requests.request import Request
from jaxattn.limits import Limits
from jaxattn.models import Hybrid
from jaxattn.models.checkpoint import native_format
from tests.helpers.kernel_cases import relative
from tests.helpers.make_greedy import FILE, TOKENS, Followed, follow, gaps

STORED = json.loads(FILE.read_text())["texts"]
BYTES = [prompt.encode() for prompt in PROMPTS]
TEXTS = [stored["text"].encode() for stored in STORED]


@pytest.fixture(scope="module")
def model():
    return native_format.load(native_format.EMBEDDED)


def greedy(engine: Engine, prompts: list[bytes], max_tokens: int) -> list[bytes]:
    requests = [Request(prompt, max_tokens=max_tokens) for prompt in prompts]
    return [bytes(completion.tokens) for completion in engine.generate(requests)]


def assert_agree(kernels: Followed, reference: Followed, *, logits: float, states: float) -> None:
    """Bounds: of the largest difference of two logits, and of the relative L2 of each state.

    A choice may differ only where the reference's two largest logits are closer than twice what
    the logits differ by: each of them may be off by that much, towards the other.
    """
    difference = np.abs(kernels.logits - reference.logits).max()
    assert difference <= logits
    second, first = np.sort(reference.logits, axis=-1)[..., -2:].transpose(2, 0, 1)
    differs = kernels.logits.argmax(-1) != reference.logits.argmax(-1)
    assert not differs[first - second > 2 * difference].any()
    for name in ("kv_cache", "conv_state", "ssm_state"):
        actual, expected = (
            np.asarray(x.state.array(name), np.float64) for x in (kernels, reference)
        )
        assert np.any(expected) and relative(actual, expected) <= states, name


def test_the_stored_texts_are_those_of_the_default_prompts():
    assert [stored["prompt"] for stored in STORED] == list(PROMPTS)
    assert all(len(text) == TOKENS for text in TEXTS)
    assert all(len(stored["gaps"]) == TOKENS for stored in STORED)


@pytest.mark.slow(
    reason="a row's bits that depend on others; found by models/test_batch and the kernels' own "
    "tests of bits too"
)
def test_a_text_is_the_same_alone_and_in_a_full_batch(model):
    limits = Limits(batch=len(BYTES), max_model_len=512)
    config, params = model
    engine = Engine(Hybrid(config), params, limits, implementation="xla")
    together = greedy(engine, BYTES, 16)
    alone = [greedy(engine, [prompt], 6)[0] for prompt in BYTES[:2]]
    assert alone == [text[:6] for text in together[:2]]
    if jax.default_backend() == "cpu":
        assert together == [text[:16] for text in TEXTS]


@pytest.mark.slow(
    reason="kernels that do not fit together; found by each kernel against float64, and a GPU's "
    "own text too"
)
def test_the_kernels_in_the_interpreter_agree_with_the_reference(model):
    # Two decode steps: the second reads what the kernels wrote.
    inputs = (*model, BYTES[:2], [text[:3] for text in TEXTS[:2]])
    reference, kernels = follow(*inputs, "xla"), follow(*inputs, "mosaic_gpu_interpret")
    assert_agree(kernels, reference, logits=0.1, states=5e-3)


@pytest.mark.gpu
def test_the_kernels_agree_with_the_reference_along_every_default_prompt(model):
    inputs = (*model, BYTES, TEXTS)
    reference, kernels = follow(*inputs, "xla"), follow(*inputs, "mosaic_gpu")
    assert_agree(kernels, reference, logits=0.4, states=2e-2)


@pytest.mark.gpu
def test_a_gpu_writes_the_text_that_a_cpu_wrote(model):
    tokens = np.array([list(text) for text in TEXTS])
    ahead = gaps(follow(*model, BYTES, TEXTS, "mosaic_gpu").logits, tokens)
    stored = np.array([stored["gaps"] for stored in STORED])
    near_ties = np.argwhere(np.abs(ahead - stored) >= stored)
    assert not near_ties.size, f"(prompt, byte) that another device may decide: {near_ties}"
    config, params = model
    engine = Engine(Hybrid(config), params, Limits(batch=4, reproducible=True))
    assert set(engine.implementations.values()) == {"mosaic_gpu"}
    assert greedy(engine, BYTES, TOKENS) == TEXTS
