"""A model that compiles in seconds on a CPU, and devices of any size, for tests of the engine."""

import dataclasses
import functools
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.engine.compilation.compiler import CompiledSteps, get_or_compile_steps
from jaxattn.engine.engine import Engine
from jaxattn.engine.requests.request import Request
from jaxattn.engine.startup.memory_plan import packed_shapes
from jaxattn.engine.steps.device_batch import CONTROLS, INTEGERS, RowIndices
from jaxattn.engine.steps.engine_state import row_shapes
from jaxattn.engine.steps.step_interface import EngineStep
from jaxattn.limits import Limits
from jaxattn.memory import device_memory as memory_device
from jaxattn.memory.device_memory import DeviceMemory
from jaxattn.models.embedded.hybrid_config import HybridConfig
from jaxattn.models.embedded.hybrid_model import Hybrid
from tests.helpers.lazy_steps import is_lazy

CONFIG = HybridConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=48,
    num_repeats=1,
    gdn_per_repeat=2,
    num_attention_heads=2,
    kv_lora_rank=64,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    rope=RopeConfig(dim=16),
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    max_position_embeddings=256,
    dtype="bfloat16",
    param_dtype="bfloat16",
)
# An attention layer and a delta net, whose states need slots.
RECURRENT = dataclasses.replace(CONFIG, hidden_size=16, intermediate_size=16, gdn_per_repeat=1)
# One attention layer, whose steps take less than half the time to trace and compile.
SMALLEST = dataclasses.replace(RECURRENT, gdn_per_repeat=0)
# In float32, a token alone has the same logits as among four, except for the last bits, and a
# preempted row is recomputed exactly, except for rounding. For three rows of up to four pages: rows
# grow into an empty pool, and one row cannot have four tokens.
EXACT = dataclasses.replace(RECURRENT, dtype="float32", param_dtype="float32")
# The same with one attention layer.
FLOAT32 = dataclasses.replace(EXACT, gdn_per_repeat=0)
# The choices of an engine on a GPU, so that all devices and plans have the same steps.
FIXED: dict[str, Any] = dict(prefill_rows=1, checkpoints=0, decode_buckets=(), prefill_buckets=())
ONE_BY_ONE = Limits(
    batch=3, max_model_len=192, num_pages=7, prefill_chunk=64, **{**FIXED, "checkpoints": 1}
)
# Three pages of 64 tokens are fewer than the longest row needs, so rows both wait and are refused.
LIMITS = Limits(batch=3, max_model_len=256, num_pages=3, prefill_chunk=16, **FIXED)
BUCKETS = dataclasses.replace(
    LIMITS, num_pages=None, batch=4, decode_buckets=(1,), prefill_rows=2, q_lens=(1, 3)
)
# Fewer rows than most tests have requests, so that requests reuse rows and slots.
TWO = dataclasses.replace(LIMITS, max_model_len=128, batch=2)
# Room for one row at full length plus one page, for four rows: the youngest are recomputed.
TIGHT = dataclasses.replace(LIMITS, batch=4, num_pages=5, prefill_rows=2)
# For a device that is filled: the pages that rows can use, and those of one row, which the engine
# tries first if bounds leave no room. Rows are as long as in ONE_BY_ONE, so that XLA compiles the
# steps without a layer once.
WHOLE, TRIAL = (dataclasses.replace(LIMITS, max_model_len=192, num_pages=n) for n in (9, 3))


# Parameters in tests/data; XLA would take up to four seconds to draw them; see make_tiny_params.py.
KEPT = [
    *((config, 0) for config in (SMALLEST, RECURRENT, FLOAT32, EXACT)),
    *((RECURRENT, seed) for seed in (1, 3)),
    (EXACT, 1),
]
FILE = Path(__file__).parents[1] / "data" / "tiny_params.npz"


def params_of(config: HybridConfig = CONFIG, seed: int = 0) -> Any:
    model = Hybrid(config)
    if (config, seed) not in KEPT:
        return model.init_params(jax.random.key(seed))
    shapes, place = model.param_shapes(), KEPT.index((config, seed))
    with np.load(FILE) as kept:
        leaves = [
            jnp.asarray(kept[f"{place}.{number}"].view(leaf.dtype))
            for number, leaf in enumerate(jax.tree.leaves(shapes))
        ]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def resized_params(config: HybridConfig, of: HybridConfig = SMALLEST) -> Any:
    """Parameters for tests whose numbers do not matter: those of `of`, repeated up to each size."""
    sizes = Hybrid(config).param_shapes()
    return jax.tree.map(
        lambda leaf, size: jnp.asarray(np.resize(np.asarray(leaf), size.shape), size.dtype),
        params_of(of),
        sizes,
    )


def kept_steps(*kinds: Limits, config: HybridConfig = SMALLEST) -> list[CompiledSteps]:
    """Compiles steps once for the whole run, for engines of these limits to use."""
    return _kept_steps(*kinds, config=config, lazy=is_lazy())


@functools.cache
def _kept_steps(*kinds: Limits, config: HybridConfig, lazy: bool) -> list[CompiledSteps]:
    model, device = Hybrid(config), jax.devices()[0]
    return [
        get_or_compile_steps(model, limits, packed_shapes(model), (device,)) for limits in kinds
    ]


def with_steps(engine: Engine, executables: dict[str, Any]) -> None:
    """Replaces an engine's executables."""
    steps = CompiledSteps(executables)
    engine._build = dataclasses.replace(engine._build, steps=steps)
    if engine._runner is not None:
        engine._runner.executables = steps.executables


def places_of(limits: Limits, tokens: Any, seq_lens: Any, tables: Any, slots: Any) -> RowIndices:
    """The input of a decode step for these tokens int32 [B], as if they had just been sampled.

    `seq_lens` include the tokens; 0 is a padding row.
    """
    batch = limits.batch
    cursor = np.zeros((batch, 3), np.int32)
    cursor[:, 0], cursor[:, 1] = tokens, np.asarray(seq_lens) - 1
    cursor[:, 2] = np.asarray(seq_lens) > 0
    controls = np.zeros((batch, CONTROLS), np.int32)
    controls[:, INTEGERS.index("slot")] = slots
    rows = jax.tree.map(lambda shape: np.zeros(shape.shape, np.int32), row_shapes(limits))
    rows = dataclasses.replace(
        rows, cursor=cursor, controls=controls, tables=np.asarray(tables, np.int32)
    )
    return RowIndices(rows, np.arange(batch, dtype=np.int32))


def run_step(engine: Engine, step: EngineStep, given: Any, state: Any) -> tuple[Any, Any]:
    """Runs a step of an engine on the engine's rows: (the step's output, the state after it)."""
    engine.start()
    runner = engine._runner
    executable = engine.executables[str(step)]
    state, runner.rows, told = step.call(executable, given, runner.weights, state, runner.rows)
    return told, state


def prompts(count: int, *, length: int = 5, max_tokens: int = 6) -> list[Request]:
    """Requests of different prompts and lengths."""
    return [
        Request([(7 * i + 3 * j) % 250 + 1 for j in range(length + i)], max_tokens=max_tokens + i)
        for i in range(count)
    ]


def pretend(monkeypatch: pytest.MonkeyPatch, *memories: DeviceMemory) -> None:
    """Makes engines see these memories one after another, and then always the last."""
    left = list(memories)

    def next_memory(device: Any) -> DeviceMemory:
        return left.pop(0) if len(left) > 1 else left[0]

    monkeypatch.setattr(memory_device, "device_memory", next_memory)


def random_requests(draw: random.Random, count: int) -> list[Request]:
    """Requests with short prompts and answers, numbered from 0; two of three are greedy."""
    return [
        Request(
            bytes(draw.randrange(256) for _ in range(draw.randint(1, 60))),
            max_tokens=draw.randint(1, 60),
            temperature=draw.choice([0, 0, 0.8]),
            seed=number,
            id=number,
        )
        for number in range(count)
    ]
