"""The model of docs/adding-a-model.md: a model outside of the package, on an unchanged engine."""

import dataclasses
import re
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import Engine, Limits, Request, check_aliasing
from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.engine.startup.engine_build import prepare
from jaxattn.models import CacheSize, DecodeBatch, DecoderModel, PrefillBatch
from jaxattn.models.blocks import MLA, Block
from jaxattn.models.interface import init_state, scratch_spec
from jaxattn.plan import plan

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-model.md"
LIMITS = Limits(batch=2, max_model_len=64, prefill_chunk=8)


@cache
def program() -> dict:
    """The names that the page's code defines."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names = {"__name__": "adding_a_model"}
    exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
    return names


@cache
def forward_of(model: DecoderModel):
    return jax.jit(lambda params, tokens: model.bind(params)(tokens))


def continued(model: DecoderModel, params, prompt: bytes, count: int) -> list[int]:
    """Greedy tokens by the training forward over the whole text, one more each time."""
    text, forward = list(prompt), partial(forward_of(model), params)
    padded = np.zeros((1, 32), np.int32)  # of one length, which is compiled once
    for _ in range(count):
        padded[0, : len(text)] = text
        text.append(int(forward(padded)[0, len(text) - 1].argmax()))
    return text[len(prompt) :]


def test_the_page_runs_and_says_what_the_training_forward_says(capsys):
    names = program()
    assert names["done"].finish_reason == "length"
    wanted = continued(names["model"], names["params"], b"a small model", 8)
    assert list(names["done"].tokens) == wanted
    size = len(
        [
            line
            for block in PAGE.read_text().split("```python")[1:]
            for line in block.split("```")[0].splitlines()
            if line.strip()
        ]
    )
    assert size <= 135


def test_it_is_prepared_planned_and_sealed():
    model = program()["model"]
    prepared = prepare(model, model.param_shapes(), LIMITS)
    items = {item.name: item for item in prepared.plan.items}
    assert items["average"].nbytes == 3 * 2 * 24 * 4 and items["tokens read"].nbytes == 3 * 2 * 4
    limits = dataclasses.replace(LIMITS, checkpoints=0)  # a GPU would choose some
    assert plan(model, "h100", limits)["average"] == items["average"].nbytes
    engine = Engine.of(prepared, strict=True)
    engine.start(program()["params"])
    texts = [b"rows", b"of other", b"lengths share the steps"]
    done = engine.generate([Request(text, max_tokens=6) for text in texts])
    for text, completion in zip(texts, done, strict=True):
        wanted = continued(model, program()["params"], text, 6)
        assert list(completion.tokens) == wanted
    assert not engine.seal.counts
    for step in engine.executables.values():
        check_aliasing(step, slack=0)


@pytest.mark.slow(
    reason="a prefix with two kinds of cache; found by the page's own model and "
    "models/test_hybrid too"
)
def test_beside_attention_it_makes_a_prefix_and_a_repeated_pattern():
    names = program()
    attention = MLA(
        num_heads=2,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        rope=RopeConfig(dim=8),
    )
    average, mla = names["layer"], Block(attention, names["layer"].feed_forward)
    blocks = (average, average, *((average, mla) * 2), average)
    model = DecoderModel(dataclasses.replace(names["model"].spec, blocks=blocks))
    assert [(s.first, len(s.pattern), s.repeats) for s in model.spec.segments] == [
        (0, 1, 3),
        (3, 2, 2),
    ]
    params = model.init_params(jax.random.key(1))
    with Engine(model, params, LIMITS) as engine:
        [done] = engine.generate([Request(b"both kinds", max_tokens=8)])
    assert list(done.tokens) == continued(model, params, b"both kinds", 8)


@pytest.mark.parametrize("packed", [False, True])
def test_a_rows_result_does_not_depend_on_what_other_slots_hold(packed):
    names = program()
    model, params = names["model"], names["params"]
    held = model.pack(params) if packed else params
    size = CacheSize(pages=4, slots=3)
    clean = init_state(model, size, scratch_spec(model, 2, max_pages=2))
    dirty = jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan if x.dtype == jnp.float32 else 7), clean
    )
    tables = np.array([[1, 2], [-1, 99]], np.int32)
    chunk = np.array([list(b"text    "), list(b"padding!")], np.int32)
    lens, slots = np.array([4, 0], np.int32), np.array([2, -1], np.int32)
    prefill, decode, found = jax.jit(model.prefill), jax.jit(model.decode), []
    for state in (clean, dirty):
        state = jax.device_put(state, jax.devices()[0])  # as what a step returns, for one program
        logits, state = prefill(held, state, PrefillBatch(chunk, lens, lens, tables, slots))
        step = DecodeBatch(chunk[:, :1], lens + (lens > 0), tables, slots)
        again, state = decode(held, state, step)
        assert not logits[1].any() and not again[1].any()
        found.append((logits[0], again[0], state.array("average")[:, 2]))
    jax.tree.map(np.testing.assert_array_equal, *found)
