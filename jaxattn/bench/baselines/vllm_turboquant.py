"""vLLM's Triton kernels for a TurboQuant cache, in our process and on our arrays.

Queries, block tables and lengths are those of `bench gqa`. The cache has vLLM's own slots, the only
ones that its kernels read; vLLM's store writes them from normal keys and values. A decode call runs
what vLLM launches: a product that rotates the queries, the splits, and their merge. The module
imports the installed vLLM's kernels.
"""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxattn.bench.attention import turboquant
from jaxattn.bench.attention.gqa import PAGE
from jaxattn.bench.attention.turboquant import TurboquantDecodeShape
from jaxattn.bench.harness import numpy_reference
from jaxattn.bench.harness.timing import TimedOp, rotation
from jaxattn.core.turboquant.codec import E4M3, TurboFormat, hadamard
from jaxattn.ops.turboquant.vllm_import import stored_codes

SPLITS = 32  # per row, as in vLLM for every length
TOKENS = 4  # that a block reads at a time
SPLIT_WARPS, SPLIT_STAGES, MERGE_WARPS, MERGE_STAGES = 1, 1, 4, 2
STORE_WARPS, STORE_STAGES = 4, 1
CENTROIDS = "vllm.model_executor.layers.quantization.turboquant.centroids"
KERNELS = "jaxattn.bench.baselines.triton_adapters.vllm_turboquant"


def levels(form: TurboFormat) -> np.ndarray:
    """float32, ascending: the values of vLLM's key codes for a key of length 1.

    For e4m3 keys, vLLM's kernel takes such levels too but does not read them.
    """
    bits = form.key_bits if form.rotated else form.value_bits
    found = importlib.import_module(CENTROIDS).get_centroids(form.head_dim, bits)
    return np.asarray(found.tolist(), np.float32)


def packed_key(form: TurboFormat) -> int:
    """Bytes of a key and its norm."""
    return form.slot_bytes - form.value_bytes - 4


def decode(shape: TurboquantDecodeShape) -> TimedOp:
    """vLLM's decode as a timed op that returns the output.

    The layers are consecutive pages of one cache; there are so many that no read hits L2.
    """
    shape = TurboquantDecodeShape(*shape)
    ours = turboquant.inputs(shape)
    layers = min(rotation(shape.read, max_inputs=32), max(1, 2**34 // shape.read))
    shared = {name: ours[name] for name in ("q", "block_tables", "seq_lens")}
    table, turn = jnp.asarray(levels(shape.form)), jnp.asarray(hadamard(shape.dim))
    cache = _filled(shape, layers, shared["block_tables"], table)
    return VllmTurboquantDecode(shape, layers, (shared, cache, table, turn))


class VllmTurboquantDecode(TimedOp):
    """vLLM's decode at a shape of the bench."""

    def __init__(self, shape: TurboquantDecodeShape, layers: int, operands: Any) -> None:
        def call(given: Any, state: Any, layer: jax.Array) -> tuple[jax.Array, Any]:
            shared, *others = given
            tables = shared["block_tables"]
            of_layer = shared | {"block_tables": tables + layer * tables.size}
            return attend(shape, of_layer, *others), state

        super().__init__(call, [operands], layers=layers)
        self.form = shape.form


def attend(
    shape: TurboquantDecodeShape,
    shared: dict[str, jax.Array],
    cache: jax.Array,
    table: jax.Array,
    turn: jax.Array,
) -> jax.Array:
    """out [B, H, D] of vLLM's launches over a cache [N, C, Hk, slot]."""
    jax_triton, kernels = (importlib.import_module(name) for name in ("jax_triton", KERNELS))
    form, (batch, heads, kv_heads, dim, *_) = shape.form, shape
    q, lens = shared["q"][:, 0], shared["seq_lens"]
    if form.rotated:
        q = jnp.dot(q.astype(jnp.float32), turn, precision=lax.Precision.HIGHEST)
    pieces = jax_triton.triton_call(
        q, cache, shared["block_tables"], lens, table,
        kernel=kernels.pieces,
        out_shape=jax.ShapeDtypeStruct((batch, heads, SPLITS, dim + 1), jnp.float32),
        grid=(batch, heads, SPLITS),
        num_warps=SPLIT_WARPS,
        num_stages=SPLIT_STAGES,
        heads=heads,
        width=shared["block_tables"].shape[1],
        splits=SPLITS,
        key_bits=form.key_bits if form.rotated else 0,
        key_bytes=form.key_bytes if form.rotated else 0,
        scale=dim**-0.5,
        tokens=TOKENS,
        rotated=form.rotated,
        **_sizes(form, kv_heads),
    )  # fmt: skip
    out, _ = jax_triton.triton_call(
        pieces, lens,
        kernel=kernels.merged,
        out_shape=(
            jax.ShapeDtypeStruct((batch, heads, dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((batch, heads), jnp.float32),
        ),
        grid=(batch, heads),
        num_warps=MERGE_WARPS,
        num_stages=MERGE_STAGES,
        heads=heads,
        dim=dim,
        splits=SPLITS,
    )  # fmt: skip
    return out


def _sizes(form: TurboFormat, kv_heads: int) -> dict[str, int]:
    """The constants of a cache that all its kernels take."""
    return {
        "kv_heads": kv_heads,
        "dim": form.head_dim,
        "page": PAGE,
        "slot": form.slot_bytes,
        "packed_key": packed_key(form),
        "value_bits": form.value_bits,
        "value_bytes": form.value_bytes,
    }


@functools.partial(jax.jit, static_argnums=(0, 1))
def _filled(
    shape: TurboquantDecodeShape, layers: int, tables: jax.Array, table: jax.Array
) -> jax.Array:
    """uint8 [L N, C, Hk, slot] of normal keys and values, stored one row of a layer at a time."""
    batch, _, kv_heads, dim, tokens, _ = shape
    token = jnp.arange(tokens)

    def row(i: jax.Array, cache: jax.Array) -> jax.Array:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), i))
        k, v = (jax.random.normal(key, (tokens, kv_heads, dim), jnp.bfloat16) for key in keys)
        page = tables[i % batch, token // PAGE] + i // batch * tables.size
        return store(shape.form, cache, k, v, page * PAGE + token % PAGE, table)

    empty = jnp.zeros((layers * tables.size, PAGE, kv_heads, shape.form.slot_bytes), jnp.uint8)
    return lax.fori_loop(0, layers * batch, row, empty)


def store(
    form: TurboFormat, cache: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array,
    table: jax.Array,
) -> jax.Array:  # fmt: skip
    """Stores keys and values [T, Hk, D] at slots [T] by vLLM's kernel, in place."""
    jax_triton, kernels = (importlib.import_module(name) for name in ("jax_triton", KERNELS))
    tokens, kv_heads, dim = k.shape
    options = _sizes(form, kv_heads) | {"rounded_bytes": 1 << (form.value_bytes - 1).bit_length()}
    slots = slots.astype(jnp.int32)
    operands: tuple[jax.Array, ...] = (k, v, slots)
    if form.rotated:
        wide = k.astype(jnp.float32)
        norms = jnp.linalg.norm(wide, axis=-1)
        unit = wide / (norms[..., None] + 1e-8)
        unit = jnp.dot(unit, jnp.asarray(hadamard(dim)), precision=lax.Precision.HIGHEST)
        borders = (table[1:] + table[:-1]) / 2
        operands = (unit, norms, v.astype(jnp.float32), borders, slots)
        options |= {"key_bits": form.key_bits, "key_bytes": form.key_bytes}
    return jax_triton.triton_call(
        *operands, cache,
        kernel=kernels.stored_levels if form.rotated else kernels.stored_e4m3,
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={len(operands): 0},
        grid=(tokens * kv_heads,),
        num_warps=STORE_WARPS,
        num_stages=STORE_STAGES,
        **options,
    )  # fmt: skip


def dequantized(
    form: TurboFormat, slots: jax.Array, table: jax.Array
) -> tuple[np.ndarray, np.ndarray]:
    """float64 keys, not rotated, and values [T, D] of vLLM's slots [T, slot] of one head."""
    codes = stored_codes(slots, form)
    values = numpy_reference.exact(codes.values) * numpy_reference.exact(codes.scale)[:, None]
    values += numpy_reference.exact(codes.minimum)[:, None]
    if not form.rotated:
        return numpy_reference.exact(lax.bitcast_convert_type(codes.keys, E4M3)), values
    assert codes.norm is not None  # rotated keys have one
    keys = numpy_reference.exact(table)[np.asarray(codes.keys)]
    keys *= numpy_reference.exact(codes.norm)[:, None] / np.linalg.norm(
        keys, axis=-1, keepdims=True
    )
    return keys @ numpy_reference.exact(hadamard(form.head_dim)), values


def error(op: TimedOp) -> float:
    """The largest relative L2 error against float64 attention over the dequantized slots.

    It covers the heads of the first and the last KV head, in the first and the last row.
    """
    assert isinstance(op, VllmTurboquantDecode)
    form, (shared, cache, table, _) = op.form, op.operands[0]
    out, q, tables = op(0), shared["q"], shared["block_tables"]
    batch, group = q.shape[0], q.shape[2] // cache.shape[2]
    errors = []
    for row, head in {(0, 0), (batch - 1, cache.shape[2] - 1)}:
        length = int(shared["seq_lens"][row])
        slots = cache[tables[row], :, head].reshape(-1, form.slot_bytes)[:length]
        group_heads, last = slice(head * group, (head + 1) * group), np.full(group, length - 1)
        right, _ = numpy_reference.attention(
            numpy_reference.exact(q[row, 0, group_heads]), *dequantized(form, slots, table), last,
            form.head_dim**-0.5,
        )  # fmt: skip
        errors.append(numpy_reference.relative_l2(np.asarray(out[row, group_heads]), right))
    return numpy_reference.worst(errors)
