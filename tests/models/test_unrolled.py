"""A decode step of one token may have its layers one after another, without a loop."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxattn.bench.model.model_lookup import find
from jaxattn.bench.model.random_weights import random_params
from jaxattn.models import CacheSize, DecodeBatch, DecoderModel, divided
from jaxattn.models.blocks import Block
from jaxattn.models.interface import init_state, jit_step, scratch_spec
from jaxattn.models.loading import huggingface_checkpoint
from jaxattn.models.network.decoder_network import DecoderNetwork
from jaxattn.parallel import Parallel

FOLDERS = Path(__file__).parents[1] / "data" / "tiny_checkpoints"


def kimi_linear() -> tuple[DecoderModel, Any]:
    """Two repeats of a KDA and an MLA layer of its sizes, of 32 experts each; random weights."""
    spec = find("Kimi-Linear-48B-A3B")[2].spec

    def fewer(block: Block) -> Block:
        ours: Any = block.feed_forward
        router = dataclasses.replace(ours.router, experts=32)
        ours = dataclasses.replace(ours, router=router)
        return dataclasses.replace(block, feed_forward=ours)

    pair = tuple(fewer(block) for block in spec.blocks[2:4])
    model = DecoderModel(dataclasses.replace(spec, blocks=pair * 2), 512)
    return model, random_params(model)


def decoded(folder: str, dtype: str) -> tuple[np.ndarray, list[np.ndarray], str]:
    """(logits of three steps, the caches after them, the step's program)."""
    if folder == "kimi_linear":
        model, params = kimi_linear()
    else:
        model, params = huggingface_checkpoint.load(FOLDERS / folder, dtype=dtype)
    params = model.pack(params)
    spec = scratch_spec(model, 1, max_pages=1)
    state = init_state(model, CacheSize(pages=1, slots=1), spec)

    def step(*given):  # JAX keeps the trace of a function
        return model.decode(*given)

    run, found, text = jit_step(step), [], ""
    for length in (1, 2, 3):
        batch = DecodeBatch(
            np.array([[5 + length]], np.int32), np.array([length], np.int32),
            np.zeros((1, 1), np.int32), np.zeros(1, np.int32),
        )  # fmt: skip
        text = text or run.lower(params, state, batch).as_text()
        logits, state = run(params, state, batch)
        found.append(np.asarray(logits))
    caches = [np.asarray(x, np.float32) for x in jax.tree.leaves(state.caches)]
    return np.stack(found), caches, text


@pytest.mark.slow(
    reason="a layer that an unrolled step leaves out; found by the logits of models/test_parity, "
    "whose segments of one layer are not looped, and by four families on a GPU too"
)
@pytest.mark.parametrize("folder", ["deepseek_v3", "qwen3_5_moe"])
def test_the_same_bits_with_and_without_a_loop(folder, monkeypatch):
    looped = decoded(folder, "float32")
    monkeypatch.setattr(DecoderNetwork, "_unrolled", lambda self, segment, *_: segment.repeats > 1)
    unrolled = decoded(folder, "float32")
    products = [len(re.findall("dot_general", text)) for *_, text in (looped, unrolled)]
    assert products[1] > products[0]  # a repeat's are written down for each of two
    np.testing.assert_array_equal(unrolled[0], looped[0])
    for one, other in zip(unrolled[1], looped[1], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("folder", ["deepseek_v3", "qwen3_5_moe", "deepseek_v3_fp8", "kimi_linear"])
def test_the_same_with_the_kernels(folder, monkeypatch):
    assert jax.default_backend() == "gpu"
    monkeypatch.setattr(DecoderNetwork, "_unrolled", lambda *_: True)
    unrolled = decoded(folder, "bfloat16")
    monkeypatch.setattr(DecoderNetwork, "_unrolled", lambda *_: False)
    looped = decoded(folder, "bfloat16")
    assert unrolled[2] != looped[2]
    near = 1e-3 * np.linalg.norm(looped[0])
    assert np.isfinite(looped[0]).all() and np.linalg.norm(unrolled[0] - looped[0]) <= near


@pytest.mark.parametrize(
    "name, tokens, backend, implementation, expected",
    [
        ("DeepSeek-V2-Lite", 1, "gpu", None, [False, True]),  # one dense layer is no loop at all
        ("DeepSeek-V2-Lite", 1, "gpu", "mosaic_gpu", [False, True]),
        ("DeepSeek-V2-Lite", 1, "gpu", "xla", [False, False]),
        ("DeepSeek-V2-Lite", 1, "cpu", None, [False, False]),
        ("DeepSeek-V2-Lite", 2, "gpu", None, [False, False]),
        ("Qwen3-Next-80B-A3B-FP8", 1, "gpu", None, [False]),  # 12 repeats of four layers
        ("Kimi-Linear-48B-A3B", 1, "gpu", None, [False, True, False]),  # 6 repeats of four
    ],
)
def test_which_steps_have_no_loop(name, tokens, backend, implementation, expected, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    spec = find(name)[2].spec
    decoder = DecoderNetwork.__new__(DecoderNetwork)
    object.__setattr__(decoder, "spec", spec)
    found = [decoder._unrolled(segment, tokens, implementation) for segment in spec.segments]
    assert found == expected


@pytest.mark.parametrize("layers, expected", [(128, True), (129, False)])
def test_a_step_of_very_many_layers_has_a_loop(layers, expected, monkeypatch):
    """Its time to lower and to compile, and the memory for both, grow with the layers."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    spec = find("Qwen3-32B")[2].spec
    [segment] = spec.segments
    decoder = DecoderNetwork.__new__(DecoderNetwork)
    object.__setattr__(decoder, "spec", spec)
    many = dataclasses.replace(segment, repeats=layers)
    assert decoder._unrolled(many, 1, None) == expected


def test_one_token_over_two_gpus_has_a_loop(monkeypatch):
    """Each GPU would wait for the others' long graphs at the first sum."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    decoder = DecoderNetwork.__new__(DecoderNetwork)
    spec = divided(find("DeepSeek-V2-Lite")[2], Parallel(tensor=2)).spec
    object.__setattr__(decoder, "spec", spec)
    assert not any(decoder._unrolled(segment, 1, None) for segment in spec.segments)
