"""The memory claim, of the decode step that the engine runs: layers share one arena, XLA's own
scratch does not grow with them, and what a step carries stays in the buffers that it was put in.

On the CPU with the reference ops at a small width, on a GPU with the kernels at their own. Depth is
repeats of the pattern: an MLA layer alone, or delta-rule layers and an MLA layer.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxattn import mla
from jaxattn.aliasing.checker import check_aliasing
from jaxattn.arena import Arena
from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.engine.startup.memory_plan import packed_shapes
from jaxattn.models.embedded.hybrid_config import HybridConfig
from jaxattn.models.embedded.hybrid_model import Hybrid
from jaxattn.models.interface import DecodeBatch, jit_step, scratch_spec
from tests.helpers import model_cases

SLACK = 64 * 1024
DEPTHS = (1, 2, 61)
ROWS, SLOTS, PAGES_PER_ROW, STEPS = 8, 9, 2, 70  # on two pages
REAL_ROWS = ROWS - 1  # the last row is padding

SMALL = HybridConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=40,
    num_repeats=1,
    num_attention_heads=2,
    kv_lora_rank=32,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=12,
    rope=RopeConfig(dim=8),
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=16,
)
# The kernels' own dimensions. Every matrix of a layer is larger than SLACK, and a row's heads fill
# the attention kernel's tile, so that its output is read where it lies.
KERNELS = HybridConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=512,
    num_repeats=1,
    num_attention_heads=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
BASE = {"cpu": SMALL, "gpu": KERNELS}
IMPLEMENTATION = {"cpu": "xla", "gpu": "mosaic_gpu"}

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
ATTENTION_ALONE = pytest.param(
    0,
    marks=pytest.mark.slow(
        reason="bytes or copies that grow with attention layers; found by engine/test_memory.py "
        "in repeats of both kinds of layer too"
    ),
)
# A GPU has the repeats of the embedded model. XLA compiles one layer of each kind in less time.
stacks = pytest.mark.parametrize(
    "gdn_per_repeat",
    [ATTENTION_ALONE, 1 if jax.default_backend() == "cpu" else 3],
    ids=["mla", "hybrid"],
)
depths = pytest.mark.parametrize("depth", DEPTHS)


@pytest.fixture(autouse=True)
def on_device(request):
    """A test with a `device` runs there, on a machine that has both as well."""
    if "device" not in request.fixturenames:
        yield
        return
    with jax.default_device(jax.devices(request.getfixturevalue("device"))[0]):
        yield


def config_of(device: str, gdn_per_repeat: int, depth: int) -> HybridConfig:
    return dataclasses.replace(BASE[device], gdn_per_repeat=gdn_per_repeat, num_repeats=depth)


def state_of(config: HybridConfig):
    return model_cases.state_of(config, ROWS, ROWS * PAGES_PER_ROW, SLOTS, max_pages=PAGES_PER_ROW)


def batch_of(length: int) -> DecodeBatch:
    """Every real row has `length` tokens in pages of its own."""
    real = np.arange(ROWS) < REAL_ROWS
    pages = np.arange(ROWS * PAGES_PER_ROW, dtype=np.int32)[::-1]
    return DecodeBatch(
        tokens=np.arange(ROWS, dtype=np.int32)[:, None],
        seq_lens=np.where(real, length, 0).astype(np.int32),
        block_tables=pages.reshape(ROWS, PAGES_PER_ROW).copy(),
        state_indices=np.where(real, SLOTS - 1 - np.arange(ROWS), -1).astype(np.int32),
    )


@functools.cache
def compiled(device: str, gdn_per_repeat: int, depth: int) -> jax.stages.Compiled:
    """The decode step as the engine compiles it, but for one thing: untuned, so that a GPU's matrix
    products take the same algorithms, with the same workspace, at every depth.
    """
    config = config_of(device, gdn_per_repeat, depth)
    step = jit_step(Hybrid(config).decode, implementation=IMPLEMENTATION[device], backend=device)
    state = jax.eval_shape(lambda: state_of(config))
    untuned = {"xla_gpu_autotune_level": 0} if device == "gpu" else None
    return step.lower(packed_shapes(Hybrid(config)), state, batch_of(1)).compile(untuned)


def nbytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def temp_of(step: jax.stages.Compiled) -> int:
    """Bytes of XLA's temp without the workspace of cuBLAS, which is 4 MiB, or 32 in a loop."""
    workspaces = re.findall(r"\bs8\[(\d+)\]", step.as_text())
    return step.memory_analysis().temp_size_in_bytes - max(map(int, workspaces), default=0)


def stacked_weights(config: HybridConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Name in a compiled step -> weights of all layers."""
    flat, _ = jax.tree_util.tree_flatten_with_path(packed_shapes(Hybrid(config)))
    return {
        f"params{jax.tree_util.keystr(path)}": leaf
        for path, leaf in flat
        if re.search("segments|vectors|weights", jax.tree_util.keystr(path))
    }


# Bytes ------------------------------------------------------------------------------------------


@devices
@stacks
def test_the_arena_has_the_same_bytes_at_every_depth(device, gdn_per_repeat):
    configs = [config_of(device, gdn_per_repeat, depth) for depth in DEPTHS]
    planned = {
        scratch_spec(Hybrid(config), ROWS, max_pages=PAGES_PER_ROW).nbytes for config in configs
    }
    held = {nbytes(jax.eval_shape(lambda c=c: state_of(c)).arena) for c in configs}
    assert held == planned and len(planned) == 1


@devices
@stacks
def test_temp_does_not_grow_with_depth(device, gdn_per_repeat):
    steps = {depth: compiled(device, gdn_per_repeat, depth) for depth in DEPTHS}
    temp = {depth: temp_of(step) for depth, step in steps.items()}
    one_layer = stacked_weights(config_of(device, gdn_per_repeat, 1)).values()
    check_aliasing(steps[61], shallower=steps[2], layers=(61, 2))
    # XLA's GPU backend packs the same values of a layer by other choices at every depth, 18 KiB
    # apart. 59 layers' smallest vectors are twice SLACK.
    assert abs(temp[61] - temp[2]) <= (0 if device == "cpu" else SLACK), temp
    # A single layer is not a loop. XLA's CPU backend takes a layer's matrices out of their stacks
    # before it multiplies, and its GPU backend finds other places for one layer's activations.
    matrices = nbytes([leaf for leaf in one_layer if leaf.ndim > 2]) if device == "cpu" else 0
    activations = 0 if device == "cpu" else 2**18
    assert temp[61] - temp[1] <= SLACK + matrices + activations, temp
    assert temp[1] - temp[61] <= SLACK, temp


# Copies -----------------------------------------------------------------------------------------


@devices
@stacks
@depths
def test_every_leaf_of_the_state_is_aliased_and_not_copied(device, gdn_per_repeat, depth):
    report = check_aliasing(compiled(device, gdn_per_repeat, depth), slack=0)
    state = jax.eval_shape(lambda: state_of(config_of(device, gdn_per_repeat, depth)))
    assert report.aliased_bytes == report.donated_bytes == nbytes(state)
    # Of a stack of 61 layers an eighth, which the check lets pass, would be many layers.
    assert not [copy for copy in report.copies if copy.leaf.startswith("state")]


@devices
@stacks
@pytest.mark.parametrize("depth", [2, 61])
def test_matrices_are_read_from_their_stacks(device, gdn_per_repeat, depth):
    step = compiled(device, gdn_per_repeat, depth)
    weights = stacked_weights(config_of(device, gdn_per_repeat, depth))
    # The convolution's weights are read from the packed ones.
    matrices = {
        name
        for name, leaf in weights.items()
        if (leaf.ndim > 2 and "conv1d" not in name) or "gdn_weights" in name
    }
    text = step.as_text().replace("\\'", "'")
    assert all(f'op_name="{name}"' in text for name in matrices)  # so that a copy is recognized
    for copy in check_aliasing(step, slack=0).copies:
        if copy.leaf in matrices:
            # The CPU backend copies a layer's matrix before its product: that one, never the stack.
            allowed = copy.leaf_nbytes // depth if device == "cpu" else SLACK
            assert copy.nbytes <= allowed, f"{copy}"


# Addresses --------------------------------------------------------------------------------------


@pytest.mark.sampled
@devices
@stacks
@depths
def test_many_steps_stay_in_the_same_buffers(device, gdn_per_repeat, depth):
    config, step = config_of(device, gdn_per_repeat, depth), compiled(device, gdn_per_repeat, depth)
    shapes = packed_shapes(Hybrid(config))
    params = jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01, leaf.dtype), shapes)
    )()
    state = jax.jit(lambda: state_of(config))()

    def pointers():
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state) if leaf.size]

    before, logits = pointers(), None
    for length in range(1, STEPS + 1):
        logits, state = step(params, state, batch_of(length))
    jax.block_until_ready((logits, state))  # what a failed step gives has no address
    assert pointers() == before
    # The steps did what they should: a latent for every token of a real row in every MLA layer,
    # and logits.
    assert np.isfinite(logits).all() and np.any(np.asarray(logits)[:REAL_ROWS])
    written = jnp.any(state.array("kv_cache") != 0, axis=-1).sum(axis=(1, 2))
    np.testing.assert_array_equal(written, REAL_ROWS * STEPS)


# DeepSeek-R1 ------------------------------------------------------------------------------------

R1 = HybridConfig(
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    num_repeats=61,
    gdn_per_repeat=0,
    num_attention_heads=128,
    q_lora_rank=1536,
)
R1_ROWS, R1_BYTES = 2048, 256 * 2**20


@pytest.mark.parametrize("max_pages", [1, 2560], ids=["64_tokens", "163840_tokens"])
def test_deepseek_r1_needs_256_mib_of_output_scratch_in_all(max_pages):
    assert R1_ROWS * R1.num_attention_heads * R1.kv_lora_rank * 2 == R1_BYTES
    for depth in DEPTHS:
        config = dataclasses.replace(R1, num_repeats=depth)
        assert scratch_spec(Hybrid(config), R1_ROWS, max_pages=max_pages).nbytes == R1_BYTES
        state = jax.eval_shape(
            lambda c=config: model_cases.state_of(c, R1_ROWS, 64, 1, max_pages=max_pages)
        )
        assert nbytes(state.arena) == R1_BYTES and state.array("kv_cache").shape[0] == depth


HEADS, RANK, LATENT = R1.num_attention_heads, R1.kv_lora_rank, R1.latent_dim
SCALE = 192**-0.5


def attention_layers(q, kv_cache, tables, lens, arena):
    """Every layer's attention of the same queries, by the kernel; sums of each row's outputs."""

    def layer(carry, i):
        arena, total = carry
        out, lse, arena = mla.mla_decode(
            q,
            kv_cache,
            tables,
            lens,
            scale=SCALE,
            layer=i,
            arena=arena,
            implementation="mosaic_gpu",
        )
        return (arena, total + out.sum(-1, dtype=jnp.float32) + lse), None

    total = jnp.zeros(q.shape[:3], jnp.float32)
    return lax.scan(layer, (arena, total), jnp.arange(kv_cache.shape[0]))[0]


def attention_shapes(layers: int) -> list:
    """Of rows of one page of 64 pages."""
    spec = mla.scratch(batch=R1_ROWS, q_len=1, num_heads=HEADS, max_pages=2560, kv_lora_rank=RANK)
    shapes = {
        "q": ((R1_ROWS, 1, HEADS, LATENT), jnp.bfloat16),
        "kv_cache": ((layers, 64, 64, LATENT), jnp.bfloat16),
        "tables": ((R1_ROWS, 1), jnp.int32),
        "lens": ((R1_ROWS,), jnp.int32),
    }
    arena = jax.eval_shape(lambda: Arena.allocate(spec))
    return [*(jax.ShapeDtypeStruct(*shape) for shape in shapes.values()), arena]


def compiled_attention(layers: int) -> jax.stages.Compiled:
    jitted = jax.jit(attention_layers, donate_argnames="arena")
    return jitted.lower(*attention_shapes(layers)).compile()


@pytest.mark.gpu
def test_deepseek_r1_attention_runs_in_256_mib_of_output_scratch():
    step = compiled_attention(3)
    report = check_aliasing(step)
    assert report.aliased_bytes == R1_BYTES
    assert report.temp_bytes < R1_BYTES / 64, report
    check_aliasing(compiled_attention(61), shallower=step)

    *shapes, abstract_arena = attention_shapes(3)
    q, kv_cache = (
        jax.random.normal(jax.random.key(n), x.shape, x.dtype) for n, x in enumerate(shapes[:2])
    )
    tables = jnp.arange(R1_ROWS, dtype=jnp.int32)[:, None] % 64
    lens = 1 + jnp.arange(R1_ROWS, dtype=jnp.int32) * 7 % 64
    arena = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_arena)
    assert nbytes(arena) == R1_BYTES
    (before,) = (leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(arena))
    arena, total = step(q, kv_cache, tables, lens, arena)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(arena)] == [before]

    for rows in (slice(8), slice(R1_ROWS - 8, None)):  # the ends of the arena
        expected = jnp.zeros((8, 1, HEADS), jnp.float32)
        for layer in range(3):
            out, lse = mla.mla_decode(
                q[rows],
                kv_cache,
                tables[rows],
                lens[rows],
                scale=SCALE,
                layer=layer,
                implementation="xla",
            )
            expected += out.sum(-1, dtype=jnp.float32) + lse
        # A sum of 512 outputs, each rounded to bfloat16 and with it its probabilities.
        np.testing.assert_allclose(total[rows], expected, atol=1, rtol=0)
