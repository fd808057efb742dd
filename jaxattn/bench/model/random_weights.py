"""Random parameters and caches of a model's real shapes, made on the device in place.

Each leaf is one executable that fills its own buffer block by block from 16 random bits a number.
So the device holds the leaves that are done, the leaf in progress and one block, nothing else.
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

BLOCK = 2**24  # numbers that are drawn at a time: their bits take 16 bytes each, 256 MiB
COMPILERS = 8  # threads
# The products at the end of a branch, scaled down so that the residual stream stays of order 1.
LAST = ("o_proj", "out_proj", "down_proj", "down")
FLOATS = ("bfloat16", "float16", "float32", "float8_e4m3fn")
E4M3_MAX, E8M0_ONE = 448.0, 127  # 2**0 in E8M0
ROOT3 = 3**0.5  # half the width of a uniform distribution of standard deviation 1


class UniformRange(NamedTuple):
    """Numbers evenly between `center` - `reach` and `center` + `reach`."""

    center: float
    reach: float

    @classmethod
    def of(cls, deviation: float, center: float = 0.0) -> "UniformRange":
        """A distribution by its standard deviation."""
        return cls(center, deviation * ROOT3)


class RandomTiles(NamedTuple):
    """Weights of 4 bits in tiles: all codes, and one scale that gives them a standard deviation."""

    form: FourBitFormat
    deviation: float

    def scales(self) -> np.ndarray:
        """uint8: the bytes of a tile behind its codes."""
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
    """`model.param_shapes()` as arrays: norms around 1, matrices that keep order 1.

    FP8 matrices use all of e4m3's finite range, and their scales bring them back to order 1.

    Raises:
        ValueError: a leaf is neither of floats nor of 4 bits; it is named.
    """
    leaves, tree = jax.tree.flatten_with_path(model.param_shapes())
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    shapes = [leaf for _, leaf in leaves]
    draws = [draw_of(name, leaf, model) for name, leaf in zip(names, shapes, strict=True)]
    return jax.tree.unflatten(tree, filled(names, shapes, draws, seed))


def random_state(
    model: DecoderModel, size: CacheSize, spec: ArenaSpec, *, seed: int = 1
) -> DecodeState:
    """`init_state(model, size, spec)` with latents, keys, values and states of order 1.

    Raises:
        ValueError: a cache has a dtype that is no float; it is named.
    """
    shapes = {cache.name: cache.shapes(size) for cache in model.caches}
    leaves, tree = jax.tree.flatten_with_path(shapes)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    arrays = filled(names, [leaf for _, leaf in leaves], [UniformRange.of(1.0)] * len(leaves), seed)
    return DecodeState(Arena.allocate(spec), jax.tree.unflatten(tree, arrays))


def forms_of(model: DecoderModel) -> set[FourBitFormat]:
    """The formats of a model's weights of 4 bits."""
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
    """What a parameter is drawn from, by its name and shape."""
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
        # Trained, it evens out what the experts get. Of 0.1, as wide as sigmoids of good experts
        # are apart, half of the experts would get nothing.
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
    """An array for each shape, the largest first; compiled together.

    An array in progress has a block beside it, whose place is a gap later. What is small fits
    there.
    """
    draws = list(draws)
    for name, shape, draw in zip(names, shapes, draws, strict=True):
        if shape.dtype.name not in FLOATS and not isinstance(draw, RandomTiles):
            raise ValueError(f"{name} is {shape.dtype.name}; random ones are {', '.join(FLOATS)}")
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
    """An array of random numbers evenly between `center` - `reach` and `center` + `reach`."""

    def drawn(bits: jax.Array) -> jax.Array:
        signed = lax.bitcast_convert_type(bits, jnp.int16).astype(jnp.float32)
        return (center + reach * (signed / 2**15)).astype(dtype)

    return _filled(key, drawn, jnp.uint16, shape, dtype)


def fill_tiles(key: jax.Array, scales: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    """Tiles of random codes and these scales."""

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
    """An array of what is made of random bits, block by block."""
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
