"""The interface of a layer's cache, and the decode state that holds the caches."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from jaxattn.arena import Arena
from jaxattn.core.cache.formats import PAGE_SIZE
from jaxattn.memory.plan import PlanItem, nbytes
from jaxattn.parallel import Parallel

type Arrays = dict[str, Array]

# The cache of a draft head's next inputs, and its arrays (`DraftInputs`).
DRAFT, DRAFT_HIDDEN, DRAFT_PAIRS = "draft", "draft_hidden", "draft_pairs"

# The arrays that layers pass on to later layers; a state contains them only within a step.
HANDED_ON = "handed on"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The state that a step carries, donated and updated in place.

    Attributes:
        arena: Scratch memory, `Model.scratch` of all steps overlaid.
        caches: The arrays of each `LayerCache` by name, under the name of the cache.
    """

    arena: Arena
    caches: dict[str, Arrays]

    def array(self, name: str) -> Array:
        """Returns an array of any cache, such as "kv_cache": names are unique within a model.

        Raises:
            KeyError: No cache has the array; the message lists the existing ones.
        """
        found = {name: x for arrays in self.caches.values() for name, x in arrays.items()}
        if name not in found:
            raise KeyError(f"no cache has an array {name!r}; the arrays are {', '.join(found)}")
        return found[name]

    def replace(self, cache: str, arrays: Arrays, arena: Arena | None = None) -> "DecodeState":
        """Returns the state with other arrays of one cache, and with `arena` if given."""
        return DecodeState(self.arena if arena is None else arena, {**self.caches, cache: arrays})

    def handing_on(self, arrays: Arrays) -> "DecodeState":
        """Returns the state with the arrays that layers pass on, if there are any."""
        caches = {name: own for name, own in self.caches.items() if name != HANDED_ON}
        return DecodeState(self.arena, {**caches, HANDED_ON: arrays} if arrays else caches)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSize:
    """The sizes of a model's caches.

    Attributes:
        pages: Number of pages of `page_size` tokens each, which the rows share.
        slots: Number of slots, one for each row that can be active.
        checkpoints: Number of additional slots for copies of a row's state; no row decodes in them.
        drafts: Largest number of tokens that a model's own draft head guesses in a step.
    """

    pages: int
    slots: int
    page_size: int = PAGE_SIZE
    checkpoints: int = 0
    drafts: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCache(abc.ABC):
    """The data that layers of one kind keep per row: any number of arrays of any shape and dtype.

    An array grows with the pages (latents, keys and values), with the slots (recurrent states, a
    ring of inputs, a cursor for each row) or with neither.

    The next row receives freed pages and slots without clearing. A fresh row, whose `seq_lens`
    equals its `query_lens`, must therefore read nothing that it has not written.

    Attributes:
        name: Name of the cache, unique within a model.
        layers: Number of layers; layer l of the cache is `array[l]`.
        recurrent: Whether a request needs the contents of its slot to resume.
    """

    recurrent: ClassVar[bool] = True

    name: str
    layers: int

    @abc.abstractmethod
    def shapes(self, size: CacheSize) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of each array, by a name that is unique within a model."""

    def spec(self, array: str, parallel: Parallel) -> PartitionSpec:
        """Returns an array's sharding over several GPUs; by default each has its own layers."""
        return PartitionSpec(parallel.axes("all"))

    @abc.abstractmethod
    def describe(self, array: str, shape: jax.ShapeDtypeStruct) -> str:
        """Returns the text of an array's line in the plan: the numbers that determine its bytes."""

    def init(self, size: CacheSize) -> Arrays:
        """Returns the arrays as they are before the first row."""
        shapes = self.shapes(size)
        return {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in shapes.items()}

    def connected(self, arrays: Arrays) -> Arrays:
        """Returns the arrays with their addresses set, once they are placed on several GPUs."""
        return arrays

    def items(self, size: CacheSize) -> tuple[PlanItem, ...]:
        """Returns the lines of the plan, one for each array: "kv_cache" becomes "kv cache"."""
        without = self.shapes(dataclasses.replace(size, checkpoints=0))

        def why(array: str, shape: jax.ShapeDtypeStruct) -> str:
            if shape.shape == without[array].shape:
                return self.describe(array, shape)
            of_prefixes = f"{size.checkpoints:,} of the slots are for states at prefix boundaries"
            return f"{self.describe(array, shape)}; {of_prefixes}"

        return tuple(
            PlanItem(line_name(array), nbytes(shape), why(array, shape))
            for array, shape in self.shapes(size).items()
        )

    def copy_slots(
        self, arrays: Arrays, source: Int[Array, " n"], target: Int[Array, " n"]
    ) -> Arrays:
        """Copies slots `source` to `target`, to create a checkpoint of rows or to restore one.

        Checkpoint slots have numbers after the active ones. Arrays that grow with the slots are
        copied. Pages are not, because the caller keeps a checkpoint's pages.
        """
        few, more = (self.shapes(CacheSize(pages=1, slots=slots)) for slots in (1, 2))
        copied = {}
        for name, array in arrays.items():
            pairs = zip(few[name].shape, more[name].shape, strict=True)
            axes = [axis for axis, (one, two) in enumerate(pairs) if one != two]
            copied[name] = array
            if axes:
                before = (slice(None),) * axes[0]
                copied[name] = array.at[(*before, target)].set(array[(*before, source)])
        return copied


# Lines that every plan contains, whose names no array of a cache may have.
PLAN_LINES = (
    "weights", "rows", "arena", "xla temp", "xla code", "rounding", "others", "driver", "in use",
    "collectives", "step inputs and outputs",
)  # fmt: skip


def line_name(array: str) -> str:
    """Returns the name of an array's line in the plan."""
    return array.replace("_", " ")


def check_caches(caches: Sequence[LayerCache]) -> None:
    """Raises ValueError, naming the caches, if a model's caches contradict each other."""
    small, large = CacheSize(pages=1, slots=1), CacheSize(pages=2, slots=2)
    lines: dict[str, str] = {}
    names: set[str] = set()
    for cache in caches:
        if cache.name in names:
            raise ValueError(f"two caches have the name {cache.name!r}")
        names.add(cache.name)
        if cache.layers < 1:
            raise ValueError(f"cache {cache.name!r} has {cache.layers} layers; it needs at least 1")
        shapes = cache.shapes(small)
        if cache.shapes(large).keys() != shapes.keys():
            raise ValueError(f"cache {cache.name!r} has different arrays for different sizes")
        for array in shapes:
            if line_name(array) in PLAN_LINES:
                raise ValueError(
                    f"cache {cache.name!r} has an array {array!r}, but {line_name(array)!r} is "
                    "another item of the plan; rename the array"
                )
            if other := lines.get(line_name(array)):
                raise ValueError(
                    f"caches {other!r} and {cache.name!r} both have an array {array!r}; rename "
                    "one of them"
                )
            lines[line_name(array)] = cache.name
