"""Random parameters and caches in a model's real shapes, filled in place on the device.

One executable per leaf fills the leaf's buffer block by block, from at most 16 random bits per
number. So the device holds only the finished leaves, the leaf in progress and one block.
"""

import functools
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxattn.arena import Arena, ArenaSpec
from jaxattn.core.numerics.four_bit_tiles import FourBitFormat, from_e2m1
from jaxattn.memory.plan import nbytes
from jaxattn.models.blocks import MoE
from jaxattn.models.caches.layer_cache import CacheSize, DecodeState
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.nn.four_bit_linear import FourBitLinears

BLOCK = 2**24  # numbers drawn at a time: their bits take 16 bytes each, 256 MiB
COMPILERS = 8  # threads
# The last products of a branch, scaled down so that the residual stream stays of order 1.
LAST = ("o_proj", "out_proj", "down_proj", "down")
FLOATS = ("bfloat16", "float16", "float32", "float8_e4m3fn")
E4M3_MAX, E8M0_ONE = 448.0, 127  # 2**0 in E8M0
ROOT3 = 3**0.5  # half the width of a uniform distribution of standard deviation 1


class UniformRange(NamedTuple):
    """A uniform distribution between `center` - `reach` and `center` + `reach`."""

    center: float
    reach: float

    @classmethod
    def of(cls, deviation: float, center: float = 0.0) -> "UniformRange":
        """The distribution with this standard deviation."""
        return cls(center, deviation * ROOT3)


class RandomTiles(NamedTuple):
    """4-bit weights in tiles: random codes, and one scale that gives a standard deviation."""

    form: FourBitFormat
    deviation: float

    def scales(self) -> np.ndarray:
        """uint8: the bytes of a tile after its codes, which hold its scales."""
        form = self.form
        codes = jnp.arange(16)
        one = jnp.full(16, E8M0_ONE)
        numbers = from_e2m1(codes, one) if form.kind == "mxfp4" else codes
        scale = self.deviation / float(np.std(np.asarray(numbers, np.float32)))
        if form.scale == "e8m0":
            of_group = np.array([E8M0_ONE + round(math.log2(scale))], np.uint8)
        else:
            of_group = np.array([scale], jnp.dtype(form.scale)).view(np.uint8)
            zero = np.array([8], np.uint16).view(np.uint8)
            of_group = np.concatenate([of_group, zero]) if form.zeros else of_group
        count = form.tile_bytes - form.code_bytes
        return np.tile(of_group, count // len(of_group))


def random_params(model: DecoderModel, *, seed: int = 0) -> Any:
    """Returns `model.param_shapes()` as random arrays whose scale keeps activations of order 1.

    Norm weights lie around 1. FP8 matrices use all of e4m3's finite range, and their scales
    compensate for it.

    Raises:
        ValueError: a leaf is neither floating-point nor 4-bit; the message names it.
    """
    leaves, tree = jax.tree.flatten_with_path(model.param_shapes())
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    shapes = [leaf for _, leaf in leaves]
    draws = [draw_of(name, leaf, model) for name, leaf in zip(names, shapes, strict=True)]
    return jax.tree.unflatten(tree, filled(names, shapes, draws, seed))


def random_state(
    model: DecoderModel, size: CacheSize, spec: ArenaSpec, *, seed: int = 1
) -> DecodeState:
    """Returns `init_state(model, size, spec)` with latents, keys, values and states of order 1.

    Raises:
        ValueError: a cache's dtype is not floating-point; the message names the cache.
    """
    shapes = {cache.name: cache.shapes(size) for cache in model.caches}
    leaves, tree = jax.tree.flatten_with_path(shapes)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    arrays = filled(names, [leaf for _, leaf in leaves], [UniformRange.of(1.0)] * len(leaves), seed)
    return DecodeState(Arena.allocate(spec), jax.tree.unflatten(tree, arrays))


def forms_of(model: DecoderModel) -> set[FourBitFormat]:
    """The formats of a model's 4-bit weights."""
    found = set[FourBitFormat]()
    for block in set(model.spec.blocks):
        for layer in (block.mixer, block.feed_forward):
            names = getattr(layer, "fp8", None)
            found |= {names.form} if isinstance(names, FourBitLinears) else set()
            found |= {layer.form} if isinstance(layer, MoE) and layer.form else set()
    return found


def draw_of(
    name: str, leaf: jax.ShapeDtypeStruct, model: DecoderModel
) -> UniformRange | RandomTiles:
    """The distribution of a parameter, by its name and shape."""
    stream, layers = model.spec.stream, len(model.spec.blocks)
    parts = name.split(".")
    if name.startswith("embedding"):
        return UniformRange.of(stream.hidden_size**-0.5 if model.spec.tie_embeddings else 1.0)
    if any("scale" in part for part in parts):
        typical = ROOT3 / E4M3_MAX * stream.hidden_size**-0.5
        return UniformRange.of(0.1 * typical, typical)
    if leaf.dtype == jnp.float8_e4m3fn:
        return UniformRange(0.0, E4M3_MAX)
    if "correction_bias" in parts:
        # A trained bias balances the experts. Sigmoid scores of good experts lie about 0.1 apart,
        # so a bias of that width would leave half of the experts unused.
        return UniformRange.of(0.01)
    if leaf.ndim <= (2 if "segments" in parts else 1):
        return UniformRange.of(0.1, 1.0 if any("norm" in part for part in parts) else 0.0)
    last = any(part in LAST for part in parts)
    factor = (2 * layers) ** -0.5 if last else 1.0
    for form in forms_of(model) if leaf.dtype == jnp.uint8 else ():
        if leaf.shape[-1] == form.tile_bytes:
            return RandomTiles(form, form.matrix(leaf.shape)[1] ** -0.5 * factor)
    inner = leaf.shape[-1] if any("conv" in part for part in parts) else leaf.shape[-2]
    return UniformRange.of(inner**-0.5 * factor)


def filled(
    names: Iterable[str],
    shapes: list[jax.ShapeDtypeStruct],
    draws: Iterable[UniformRange | RandomTiles],
    seed: int,
) -> list[jax.Array]:
    """Returns a random array for each shape; all are compiled together.

    The largest are filled first. An array in progress needs a block next to it, which later leaves
    a gap; the small arrays fit there.
    """
    draws = list(draws)
    for name, shape, draw in zip(names, shapes, draws, strict=True):
        if shape.dtype.name not in FLOATS and not isinstance(draw, RandomTiles):
            raise ValueError(
                f"{name} is {shape.dtype.name}; random weights support only {', '.join(FLOATS)}"
            )
    key = jax.random.key(seed)
    kinds = {
        (shape.shape, shape.dtype.name, draw.form if isinstance(draw, RandomTiles) else None)
        for shape, draw in zip(shapes, draws, strict=True)
    }
    with ThreadPoolExecutor(COMPILERS) as pool:
        fills = dict(zip(kinds, pool.map(lambda kind: _compiled(*kind), kinds), strict=True))
    wanted = list(enumerate(zip(shapes, draws, strict=True)))
    made = {
        number: (
            fills[shape.shape, "uint8", draw.form](jax.random.fold_in(key, number), draw.scales())
            if isinstance(draw, RandomTiles)
            else fills[shape.shape, shape.dtype.name, None](
                jax.random.fold_in(key, number), *map(float, draw)
            )
        )
        for number, (shape, draw) in sorted(wanted, key=lambda each: -nbytes(each[1][0]))
    }
    return [made[number] for number in range(len(wanted))]


def _compiled(
    shape: tuple[int, ...], dtype: str, form: FourBitFormat | None = None
) -> jax.stages.Compiled:
    if form is not None:
        tiles = jax.jit(functools.partial(fill_tiles, shape=shape))
        scales = jax.ShapeDtypeStruct((form.tile_bytes - form.code_bytes,), jnp.uint8)
        return tiles.lower(jax.random.key(0), scales).compile()
    filled = jax.jit(functools.partial(fill, shape=shape, dtype=dtype))
    return filled.lower(jax.random.key(0), 0.0, 0.0).compile()


def fill(
    key: jax.Array,
    center: jax.Array | float,
    reach: jax.Array | float,
    *,
    shape: tuple[int, ...],
    dtype: str,
) -> jax.Array:
    """An array of uniform random numbers between `center` - `reach` and `center` + `reach`."""

    def drawn(bits: jax.Array) -> jax.Array:
        signed = lax.bitcast_convert_type(bits, jnp.int16).astype(jnp.float32)
        return (center + reach * (signed / 2**15)).astype(dtype)

    return _filled(key, drawn, jnp.uint16, shape, dtype)


def fill_tiles(key: jax.Array, scales: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    """Tiles with random codes and the given scales."""

    def drawn(bits: jax.Array) -> jax.Array:
        return bits.at[..., shape[-1] - len(scales) :].set(scales)

    return _filled(key, drawn, jnp.uint8, shape, "uint8")


def _filled(
    key: jax.Array,
    drawn: Callable[[jax.Array], jax.Array],
    bits_dtype: Any,
    shape: tuple[int, ...],
    dtype: str,
) -> jax.Array:
    """Fills an array block by block with `drawn` of random bits."""
    size = math.prod(shape)
    row = shape[-1] if shape else 1
    rows = _divisor(size // row, max(BLOCK // row, 1)) if size else 1
    blocks = size // (rows * row) if size else 0

    def block(number: jax.Array, out: jax.Array) -> jax.Array:
        bits = jax.random.bits(jax.random.fold_in(key, number), (1, rows, row), bits_dtype)
        return lax.dynamic_update_slice(out, drawn(bits), (number, 0, 0))

    out = lax.fori_loop(0, blocks, block, jnp.zeros((blocks, rows, row), dtype))
    return out.reshape(shape)


def _divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)
