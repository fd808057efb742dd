"""Without a GPU: kernels lowered for one, whose rules differ from the interpreter's.

What a kernel takes in place is an operand and a result of its launch; nothing else may be.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxattn.arena import Arena
from jaxattn.core.layer_index import LayerIndex
from jaxattn.core.numerics.rope import RopeConfig, rotation
from jaxattn.kernels.gdn.decode import launch as gdn_decode
from jaxattn.kernels.gqa import append as gqa_append_kernel
from jaxattn.kernels.gqa.decode import launch as gqa_decode
from jaxattn.kernels.gqa.decode.split_kv.decode_schedule import decode_schedule as gqa_schedule
from jaxattn.kernels.gqa.prefill import launch as gqa_prefill
from jaxattn.kernels.mla import append
from jaxattn.kernels.mla.decode import launch as mla_decode
from jaxattn.kernels.mla.decode.decode_schedule import decode_schedule
from jaxattn.kernels.mla.prefill import launch as mla_prefill_kernel
from jaxattn.kernels.moe import launch as moe
from jaxattn.ops.gdn.layer_decode import gated_delta_net_decode
from jaxattn.ops.gqa.append import gqa_append
from jaxattn.ops.gqa.prefill import gqa_attention
from jaxattn.ops.gqa.prefill import gqa_prefill as prefill_op
from jaxattn.ops.mla.append import mla_append as append_op
from jaxattn.ops.mla.prefill import causal_attention, mla_prefill
from jaxattn.ops.moe.experts import mixture_of_experts
from tests.helpers.gqa_cases import launch_gqa_decode
from tests.helpers.kernel_cases import launch_mla_decode, slow


@pytest.fixture(autouse=True)
def no_gpu_needed(monkeypatch):
    for module in (
        gdn_decode,
        gqa_append_kernel,
        gqa_decode,
        gqa_prefill,
        append,
        mla_decode,
        moe,
    ):
        monkeypatch.setattr(module, "require_hopper", lambda *args, **kwargs: None)


def launches(step, *args, **kwargs):
    """Each Mosaic launch's line in the module for CUDA."""
    text = jax.jit(step).trace(*args, **kwargs).lower(lowering_platforms=("cuda",)).as_text()
    return [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


ints = functools.partial(shape, dtype=jnp.int32)


@pytest.mark.slow_cases(
    reason="an operand of 512 dims; found by 576 dims there, and by latents without rotated dims "
    "in test_swap_ab, in the interpreter and on a GPU, too"
)
@pytest.mark.sampled
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(pair=True),
        dict(page=16, ragged=True),
        dict(page=128, output_by_tma=True),
        dict(batch_invariant=True),
        slow(dict(dim=512)),
    ],
    ids=str,
)
def test_mla_decode(options):
    options = dict(options)
    pair, ragged, page = (options.pop(name, 0) for name in ("pair", "ragged", "page"))
    invariant, page = options.pop("batch_invariant", False), page or 64
    dim = options.pop("dim", 576)
    batch, q_len, heads, pages = 4, 2, 64, 4096 // page
    q = shape(batch, q_len, heads, dim)
    if pair:
        q = (shape(batch, q_len, heads, 512), shape(batch, q_len, heads, 64))
    query_lens = ints(batch) if ragged else None

    def step(q, cache, tables, lens, query_lens):
        schedule = decode_schedule(
            lens, q_len=q_len, num_heads=heads, max_pages=pages, page_size=page,
            batch_invariant=invariant,
        )  # fmt: skip
        return launch_mla_decode(
            q, cache, tables, lens, scale=0.1, query_lens=query_lens, schedule=schedule, **options
        )

    args = (q, shape(8, page, dim), ints(batch, pages), ints(batch), query_lens)
    decode, combine = launches(step, *args)
    # The output and the partial results; then the output and its LSE, the rest being read.
    assert decode.count("output_operand_alias<") == 2
    assert combine.count("output_operand_alias<") == 2


@pytest.mark.sampled
@pytest.mark.parametrize(
    "cache, width, page, heads, q_len",
    [("float16", 576, 16, 20, 2), ("float8_e4m3fn", 576, 128, 3, 1), ("uint8", 656, 64, 12, 3)],
)
def test_mla_decode_with_heads_as_columns(cache, width, page, heads, q_len):
    """More rows than parts, each of which may have fewer tokens than places."""
    dtype = jnp.float16 if cache == "float16" else jnp.bfloat16
    kv_scale = shape(dtype=jnp.float32) if cache == "float8_e4m3fn" else None

    def step(q, cache, tables, lens, query_lens, kv_scale):
        schedule = decode_schedule(
            lens, q_len=q_len, num_heads=heads, max_pages=4096 // page, page_size=page
        )
        assert schedule.order is not None
        return launch_mla_decode(
            q, cache, tables, lens, scale=0.1, columns=True, query_lens=query_lens,
            kv_scale=kv_scale, schedule=schedule,
        )  # fmt: skip

    args = (shape(200, q_len, heads, 576, dtype=dtype), shape(8, page, width, dtype=cache))
    tables, lens = ints(200, 4096 // page), ints(200)
    decode, combine = launches(step, *args, tables, lens, ints(200), kv_scale)
    # The rows' lengths, those that the schedule knows, their order and their tokens.
    assert decode.count("tensor<200xi32>") == 4
    assert decode.count("output_operand_alias<") == 2
    assert combine.count("output_operand_alias<") == 2


@pytest.mark.slow(
    reason="an operand of the order; found by heads as columns, of 200 rows, and by MLA decode, too"
)
@pytest.mark.parametrize("columns", [False, True])
def test_mla_decode_of_more_rows_than_parts(columns):
    batch, heads = 200, 20

    def step(q, cache, tables, lens):
        schedule = decode_schedule(lens, q_len=1, num_heads=heads, max_pages=64)
        assert schedule.order is not None
        return launch_mla_decode(
            q, cache, tables, lens, scale=0.1, columns=columns, schedule=schedule
        )

    args = (shape(batch, 1, heads, 576), shape(8, 64, 576), ints(batch, 64), ints(batch))
    decode, combine = launches(step, *args)
    # The rows' lengths, those that the schedule knows, and their order, which is read alone.
    assert decode.count("tensor<200xi32>") == 3
    assert decode.count("output_operand_alias<") == 2
    assert combine.count("output_operand_alias<") == 2


@pytest.mark.parametrize("interleaved", [True, False])
def test_mla_append(interleaved):
    config = RopeConfig(interleaved=interleaved)

    def step(kv, q, weights, cache, tables, lens, layer):
        return append_op(
            kv, q, weights, cache, tables, lens,
            rotation=rotation(lens[:, None], config), config=config, layer=layer,
            implementation="mosaic_gpu",
        )  # fmt: skip

    args = (shape(4, 1, 576), shape(4, 1, 1536), shape(2, 576 + 1536, dtype=jnp.float32))
    (launch,) = launches(step, *args, shape(2, 8, 64, 576), ints(4, 8), ints(4), ints())
    assert launch.count("output_operand_alias<") == 1


@pytest.mark.parametrize("dim, dtype", [(64, jnp.float8_e4m3fn), (256, jnp.bfloat16)])
def test_gqa_append(dim, dtype):
    config = RopeConfig(dim=64, interleaved=False)

    def step(q, k, v, weights, cache, tables, lens, layer, kv_scale):
        return gqa_append(
            q, k, v, weights, cache, tables, lens,
            rotation=rotation(lens[:, None], config), config=config, layer=layer,
            kv_scale=kv_scale, implementation="mosaic_gpu",
        )  # fmt: skip

    f32 = functools.partial(shape, dtype=jnp.float32)
    args = (
        shape(4, 1, 8, dim),
        shape(4, 1, 2, dim),
        shape(4, 1, 2, dim),
        f32(2, max(2 * dim, 256)),
    )
    cache, scales = shape(2, 8, 2, 64, 2, dim, dtype=dtype), f32(2, 2) if dim == 64 else None
    (launch,) = launches(step, *args, cache, ints(4, 8), ints(4), ints(), scales)
    assert launch.count("output_operand_alias<") == 1


def test_gdn_decode_of_a_layer_in_a_pattern():
    heads, keys = 4, 2
    channels = (2 * keys + heads) * 128

    def step(qkvz, ba, weights, conv, state, slots, repeat):
        return gated_delta_net_decode(
            qkvz, ba, weights, conv, state, slots, layer=LayerIndex(repeat, 3, 1),
            implementation="mosaic_gpu",
        )  # fmt: skip

    f32 = functools.partial(shape, dtype=jnp.float32)
    args = (
        shape(2, 1, channels + heads * 128),
        f32(2, 1, 2 * heads),
        f32(6, 2 * heads + 128 + 4 * channels),
        shape(6, 3, 3, channels),
        f32(6, 3, heads, 128, 128),
    )
    (launch,) = launches(step, *args, ints(2), ints())
    assert launch.count("output_operand_alias<") == 2


@pytest.mark.sampled
@pytest.mark.parametrize(
    "tokens, experts, top_k, hidden, width, fp8",
    [
        (1, 64, 6, 2048, 1408, False),
        (8192, 64, 6, 2048, 1408, False),
        (32, 64, 4, 2048, 1536, False),
        (8, 512, 10, 2048, 512, True),
        (128, 256, 8, 7168, 2048, True),
        (3, 8, 3, 128, 64, False),
    ],
    ids=["v2-lite", "v2-lite prefill", "glm-4.7-flash", "qwen3-next", "v3", "tiny"],
)
def test_moe(tokens, experts, top_k, hidden, width, fp8):
    f32 = functools.partial(shape, dtype=jnp.float32)
    stored = functools.partial(shape, 4, experts, dtype=jnp.float8_e4m3fn if fp8 else jnp.bfloat16)
    blocks = functools.partial(f32, 4, experts)

    def step(*args, gate_up_scale=None, down_scale=None):
        return mixture_of_experts(
            *args[:-1], layer=args[-1], gate_up_scale=gate_up_scale, down_scale=down_scale,
            implementation="mosaic_gpu",
        )  # fmt: skip

    scales = {}
    if fp8:
        scales["gate_up_scale"] = blocks(2, width // 128, hidden // 128)
        scales["down_scale"] = blocks(hidden // 128, width // 128)
    args = (shape(tokens, hidden), ints(tokens, top_k), f32(tokens, top_k))
    args = (*args, stored(2 * width, hidden), stored(hidden, width), ints())
    *few, gate_up, down, combine = launches(step, *args, **scales)
    assert len(few) == (1 if tokens * top_k <= 1536 else 3)  # that list and sort the tokens
    # What is between the products is written in place; weights are read where they lie.
    assert gate_up.count("output_operand_alias<") == down.count("output_operand_alias<") == 1
    assert combine.count("output_operand_alias<") == 0
    for launch in (gate_up, down):
        assert f"tensor<4x{experts}x" in launch


def test_experts_of_many_tokens_lower_with_an_arena():
    """Results of both products lie in the arena, each in a lane of its own."""
    sizes = dict(tokens=1024, top_k=6, experts=64, hidden=2048, expert_size=1408)
    arena = jax.eval_shape(lambda: Arena.allocate(moe.scratch(**sizes)))

    def experts(x, ids, weights, gate_up, down, arena):
        return mixture_of_experts(
            x, ids, weights, gate_up, down, layer=1, arena=arena, implementation="mosaic_gpu"
        )

    found = launches(
        experts, shape(1024, 2048), ints(1024, 6), shape(1024, 6, dtype=jnp.float32),
        shape(2, 64, 2816, 2048), shape(2, 64, 2048, 1408), arena,
    )  # fmt: skip
    assert sum("output_operand_alias<" in launch for launch in found) == 2


@pytest.mark.sampled
@pytest.mark.parametrize(
    "heads, kv_heads, dim, page, options",
    [
        (32, 8, 128, 16, dict(soft_cap=30.0)),
        (64, 8, 64, 64, dict(window=128, sinks=True, dtype=jnp.float16)),
        (16, 2, 256, 128, dict(q_len=4, ragged=True, gate=True)),
        (20, 4, 128, 32, dict(batch_invariant=True)),
        (64, 8, 64, 16, dict(fp8=True, sinks=True)),
        (16, 2, 256, 64, dict(fp8=True, gate=True)),
    ],
    ids=str,
)
def test_gqa_decode(heads, kv_heads, dim, page, options):
    get = {"q_len": 1, "dtype": jnp.bfloat16, **options}.get
    batch, q_len, dtype, window = 4, get("q_len"), get("dtype"), get("window")

    def step(q, cache, tables, lens, query_lens, sinks, gate, kv_scale):
        schedule = gqa_schedule(
            lens, q_len=q_len, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
            max_pages=4096 // page, page_size=page, window=window,
            batch_invariant=bool(get("batch_invariant")),
        )  # fmt: skip
        return launch_gqa_decode(
            q, cache, tables, lens, scale=0.1, layer=1, query_lens=query_lens, window=window,
            sinks=sinks, soft_cap=get("soft_cap"), gate=gate, kv_scale=kv_scale,
            schedule=schedule,
        )  # fmt: skip

    q = shape(batch, q_len, heads, dim, dtype=dtype)
    stored, scales = dtype, None
    if get("fp8"):
        stored, scales = jnp.float8_e4m3fn, shape(2, kv_heads, dtype=jnp.float32)
    args = (q, shape(2, 9, 2, page, kv_heads, dim, dtype=stored), ints(batch, 4096 // page))
    query_lens = ints(batch) if get("ragged") else None
    sinks = shape(heads, dtype=jnp.float32) if get("sinks") else None
    more = ints(batch), query_lens, sinks, get("gate") and q, scales
    # One launch, in place: the output, and the partial results. A window's few steps are in one
    # piece, and nothing is merged.
    found = [line.count("output_operand_alias<") for line in launches(step, *args, *more)]
    assert found == ([1] if window else [2])


@pytest.mark.sampled
@pytest.mark.parametrize(
    "heads, kv_heads, dim, page, options",
    [
        (32, 8, 128, 16, dict(soft_cap=30.0)),
        (64, 8, 64, 64, dict(window=128, sinks=True, dtype=jnp.float16)),
        (16, 2, 256, 128, dict(gate=True)),
        (20, 4, 128, 32, dict(tokens=12)),
    ],
    ids=str,
)
def test_gqa_prefill(heads, kv_heads, dim, page, options):
    get = {"tokens": 2048, "dtype": jnp.bfloat16, **options}.get
    batch, tokens, dtype = 2, get("tokens"), get("dtype")

    def step(q, k, v, cache, tables, lens, new, sinks, gate):
        return prefill_op(
            q, k, v, cache, tables, lens, new, layer=1, window=get("window"),
            soft_cap=get("soft_cap"), sinks=sinks, gate=gate, implementation="mosaic_gpu",
        )  # fmt: skip

    q = shape(batch, tokens, heads, dim, dtype=dtype)
    kv = shape(batch, tokens, kv_heads, dim, dtype=dtype)
    cache = shape(2, 9, 2, page, kv_heads, dim, dtype=dtype)
    sinks = shape(heads, dtype=jnp.float32) if get("sinks") else None
    args = (q, kv, kv, cache, ints(batch, 4096 // page), ints(batch), ints(batch))
    (launch,) = launches(step, *args, sinks, get("gate") and q)
    assert launch.count("output_operand_alias<") == 0
    assert f"tensor<2x18x{page}x{kv_heads * dim}x" in launch  # the whole cache, read where it lies


def test_mla_prefill_of_wide_heads():
    def step(q, k, v, k_pe):
        return causal_attention(q, k, v, k_pe=k_pe, scale=0.1, implementation="mosaic_gpu")

    of_heads = (shape(1, 2048, 20, dims) for dims in (256, 192, 256))
    (launch,) = launches(step, *of_heads, shape(1, 2048, 64))
    assert "tensor<1x2048x20x192x" in launch and "tensor<1x2048x64x" in launch  # never joined


@pytest.mark.slow(
    reason="a gradient that does not lower within a scan; found by nn/test_training's scans of XLA "
    "and by kernels/attention on a GPU too"
)
def test_scanned_gqa_attention_is_differentiated():
    def loss(q, k):
        def layer(q, _):
            return gqa_attention(q, k, k, implementation="mosaic_gpu")[0], None

        return jax.lax.scan(layer, q, None, length=2)[0].astype(jnp.float32).sum()

    # More tiles than multiprocessors, which blocks so draw one after another.
    assert len(launches(jax.grad(loss), shape(1, 8192, 8, 128), shape(1, 8192, 4, 128))) == 2


@pytest.mark.slow(
    reason="an operand of lines that does not lower; found by rows in lines of "
    "kernels/mla/prefill/test_kernel, in the interpreter and on a GPU, too"
)
@pytest.mark.parametrize(
    "nope, values", [(128, 128), pytest.param(192, 256, marks=pytest.mark.slow)]
)
def test_prefill_of_rows_in_lines_lowers(monkeypatch, nope, values):
    """A launch of the new tokens, once rounded and once for the prefixes' blocks behind them."""
    monkeypatch.setattr(mla_prefill_kernel, "require_hopper", lambda *args, **kwargs: None)
    heads, lines, rows, rank = 2, 4, 3, 128
    found = launches(
        functools.partial(mla_prefill, scale=0.1, implementation="mosaic_gpu"),
        shape(lines, 128, heads, nope + 64),
        shape(lines, 128, rank + 64),
        shape(heads, nope, rank),
        shape(heads, rank, values),
        shape(2, 9, 64, rank + 64),
        ints(rows, 5),
        ints(rows),
        ints(rows),
        layer=ints(),
        lines=ints(lines),
    )
    assert len(found) >= 2
