"""The kinds of cache that models use: pages of latents, of keys and values, of codes; states."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxattn.core.cache.formats import IndexKeyFormat, LatentFormat
from jaxattn.core.turboquant.codec import TurboFormat
from jaxattn.models.caches.layer_cache import CacheSize, LayerCache
from jaxattn.parallel import Parallel


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentPages(LayerCache):
    """MLA's latents: `kv_cache` [L, N, C, Ds] in one of the formats of `LatentFormat`.

    Attributes:
        array: Name of the array; it differs if another cache of the model has a `kv_cache`.
    """

    format: LatentFormat
    array: str = "kv_cache"

    def shapes(self, size: CacheSize) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (self.layers, size.pages, size.page_size, self.format.width)
        return {self.array: jax.ShapeDtypeStruct(shape, self.format.dtype)}

    def spec(self, array: str, parallel: Parallel) -> PartitionSpec:
        return PartitionSpec(None, _pages(parallel))

    def describe(self, array: str, shape: jax.ShapeDtypeStruct) -> str:
        layers, pages, page_size, width = shape.shape
        return (
            f"{layers} MLA layers x {pages:,} pages x {page_size} tokens x {width} "
            f"{shape.dtype.name}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseLatentPages(LatentPages):
    """Latents for sparse attention, and the keys of the layers' indexers in pages of the same ids.

    The keys are `index_cache` [L, N, C, D], with `index_scale` [L, N, C] for FP8 keys.

    Attributes:
        keys: Format of the keys, or None for layers without an indexer.
    """

    keys: IndexKeyFormat | None

    def shapes(self, size: CacheSize) -> dict[str, jax.ShapeDtypeStruct]:
        tokens, found = (self.layers, size.pages, size.page_size), super().shapes(size)
        if self.keys is None:
            return found
        shape = (*tokens, self.keys.head_dim)
        found["index_cache"] = jax.ShapeDtypeStruct(shape, self.keys.dtype)
        if self.keys.scaled:
            found["index_scale"] = jax.ShapeDtypeStruct(tokens, jnp.float32)
        return found

    def describe(self, array: str, shape: jax.ShapeDtypeStruct) -> str:
        if array == self.array:
            return super().describe(array, shape)
        layers, pages, page_size, *width = shape.shape
        what = f"{width[0]} {shape.dtype.name}" if width else f"a {shape.dtype.name} scale"
        return f"{layers} indexers x {pages:,} pages x {page_size} tokens x {what}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyValuePages(LayerCache):
    """Grouped-query attention's keys and values: `kv_cache` [L, N, 2, C, Hk, D].

    Attributes:
        heads: Hk, the number of key-value heads.
        head_dim: D.
        dtype: Dtype of keys and values.
        array: Name of the array; it differs if another cache of the model has a `kv_cache`.
    """

    heads: int
    head_dim: int
    dtype: DTypeLike
    array: str = "kv_cache"

    def shapes(self, size: CacheSize) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (self.layers, size.pages, 2, size.page_size, self.heads, self.head_dim)
        return {self.array: jax.ShapeDtypeStruct(shape, self.dtype)}

    def spec(self, array: str, parallel: Parallel) -> PartitionSpec:
        return PartitionSpec(None, _pages(parallel), None, None, parallel.axes("heads"))

    def describe(self, array: str, shape: jax.ShapeDtypeStruct) -> str:
        layers, pages, _, page_size, heads, dim = shape.shape
        return (
            f"{layers} attention layers x {pages:,} pages x {page_size} tokens x 2 x {heads} heads "
            f"x {dim} {shape.dtype.name}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurboquantPages(LayerCache):
    """TurboQuant's codes of keys and values: `kv_cache` uint8 [L, N, Hk, C * slot_bytes].

    Attributes:
        heads: Hk, the number of key-value heads.
        form: Format of a token's slot.
        array: Name of the array; it differs if another cache of the model has a `kv_cache`.
    """

    heads: int
    form: TurboFormat
    array: str = "kv_cache"

    @property
    def head_dim(self) -> int:
        return self.form.head_dim

    def shapes(self, size: CacheSize) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (self.layers, size.pages, self.heads, size.page_size * self.form.slot_bytes)
        return {self.array: jax.ShapeDtypeStruct(shape, jnp.uint8)}

    def spec(self, array: str, parallel: Parallel) -> PartitionSpec:
        return PartitionSpec(None, _pages(parallel), parallel.axes("heads"))

    def describe(self, array: str, shape: jax.ShapeDtypeStruct) -> str:
        layers, pages, heads, size = shape.shape
        form = self.form
        return (
            f"{layers} attention layers x {pages:,} pages x {size // form.slot_bytes} tokens x "
            f"{heads} heads x {form.slot_bytes} bytes, {form.preset}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentState(LayerCache):
    """A delta rule's states and the last inputs of the convolution before it, by slot.

    Attributes:
        conv_shape: [W - 1, Dc], the inputs that the next token's convolution reads.
        conv_dtype: Dtype of these inputs.
        state_shape: [Hv, Dv, Dk], float32.
        kind: Kind of the layers, for the plan.
    """

    conv_shape: tuple[int, int]
    conv_dtype: DTypeLike
    state_shape: tuple[int, int, int]
    kind: str = "GDN"

    def shapes(self, size: CacheSize) -> dict[str, jax.ShapeDtypeStruct]:
        rows = (self.layers, size.slots + size.checkpoints)
        return {
            "conv_state": jax.ShapeDtypeStruct((*rows, *self.conv_shape), self.conv_dtype),
            "ssm_state": jax.ShapeDtypeStruct((*rows, *self.state_shape), jnp.float32),
        }

    def spec(self, array: str, parallel: Parallel) -> PartitionSpec:
        rows, heads = parallel.axes("data"), parallel.axes("tensor")
        if array == "conv_state":
            return PartitionSpec(None, rows, None, heads)
        return PartitionSpec(None, rows, heads)

    def describe(self, array: str, shape: jax.ShapeDtypeStruct) -> str:
        layers, slots, *of_slot = shape.shape
        what = f"{layers} {self.kind} layers x {slots:,} slots x "
        if array == "conv_state":
            return f"{what}last {of_slot[0]} inputs x {of_slot[1]} {shape.dtype.name}"
        return f"{what}{'x'.join(map(str, of_slot))} {shape.dtype.name}"


def _pages(parallel: Parallel) -> tuple[str, ...]:
    """Returns the mesh axes of pages: those of data groups, then those of GPUs that share rows."""
    return (*parallel.axes("data"), *parallel.axes("context"))
