"""Weights that the next launches read, asked for into L2 while a launch still runs.

    with reading_ahead((WeightSlab(o_proj, layer, 0, 8 << 20),)):
        y = linear_layer(...)          its blocks ask for 8 MiB of o_proj too

In a decode step of one token each launch reads a few megabytes. Between two launches the memory has
nothing to do: the last sums of one, the start of the next, and the way of its first bytes take 2 to
3 us. A block that has asked for all of its own weights therefore asks for its share of those that
come next. Nothing waits for them, and they change no result.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.stacked_layer import StackedLayer
from jaxattn.kernels.hopper.mlir import arith, ir, mgpu, utils
from jaxattn.kernels.hopper.ptx import asm, asm_word, plus, pointer, single, times, word

LINE = 128  # bytes
MOST = 16 * 1024  # bytes of an instruction
PLAIN, SPLAT = plgpu.RefType(), plgpu.Layout.WG_SPLAT


@dataclasses.dataclass(frozen=True, eq=False)
class WeightSlab:
    """Bytes of a layer of a stack.

    Attributes:
        stack: [L, ...], of all layers.
        layer: which; a number outside of the stack asks for nothing.
        first: its first byte that is asked for, a multiple of 16.
        nbytes: how many, a multiple of 16.
    """

    stack: jax.Array
    layer: StackedLayer
    first: int
    nbytes: int

    @classmethod
    def whole(cls, stack: jax.Array, layer: StackedLayer) -> "WeightSlab":
        return cls(stack, layer, 0, math.prod(stack.shape[1:]) * stack.dtype.itemsize)

    @property
    def place(self) -> tuple[int, ...]:
        """What a kernel knows of it when it is traced: (layers, bytes of one, a, b, first, bytes),
        for the layer a * n + b."""
        whole = math.prod(self.stack.shape[1:]) * self.stack.dtype.itemsize
        layer = self.layer
        numbers = len(self.stack), whole, layer.per_repeat, layer.place
        return *numbers, self.first, self.nbytes


_slabs: ContextVar[tuple[WeightSlab, ...]] = ContextVar("read_ahead", default=())
_launch: ContextVar[tuple["LaunchSlabs", Any, Any] | None] = ContextVar("asking", default=None)


@contextlib.contextmanager
def reading_ahead(slabs: tuple[WeightSlab, ...]) -> Iterator[None]:
    """Within it, launches that can ask for these slabs, in this order. Their layers are of one
    repeat."""
    token = _slabs.set(slabs)
    try:
        yield
    finally:
        _slabs.reset(token)


@dataclasses.dataclass(frozen=True)
class LaunchSlabs:
    """What the blocks of a launch ask for.

    Attributes:
        places: of each slab.
        blocks: of the launch.
    """

    places: tuple[tuple[int, ...], ...]
    blocks: int

    @contextlib.contextmanager
    def known(self, operands: Sequence[Any]) -> Iterator[None]:
        """Within it, while the body is traced, `ask_ahead` knows them.

        Args:
            operands: the references of `operands_ahead`; empty if there is nothing to ask for.
        """
        token = _launch.set((self, *operands) if operands else None)
        try:
            yield
        finally:
            _launch.reset(token)


def operands_ahead(blocks: int) -> tuple[LaunchSlabs, tuple[Any, ...]]:
    """What a launch of so many blocks asks for, and its operands for this, which may be none."""
    slabs = _slabs.get()
    found = LaunchSlabs(tuple(each.place for each in slabs), blocks)
    if not slabs:
        return found, ()
    repeat = jnp.asarray(slabs[0].layer.repeat, jnp.int32).reshape(1)
    return found, (tuple(each.stack for each in slabs), repeat)


def ask_ahead() -> None:
    """A block's share of what the launch asks for; to be called by one warpgroup."""
    if (here := _launch.get()) is None:
        return
    launched, refs, repeat = here
    number = repeat[0]
    for ref, (layers, whole, a, b, first, nbytes) in zip(refs, launched.places, strict=True):
        of_layer = number * a + b
        there = jnp.where((of_layer >= 0) & (of_layer < layers), nbytes, 0)
        ask(ref, of_layer, there, whole=whole, first=first, most=nbytes, blocks=launched.blocks)


def ask(
    ref: Any, slab: Any, nbytes: Any, *, whole: int, first: int = 0, most: int, blocks: int
) -> None:
    """A block's share of `nbytes`, at most `most`, from byte `first` of a slab of `whole` bytes."""
    share = -(-most // (blocks * LINE)) * LINE

    def run(ctx: Any, ref: Any, slab: Any, nbytes: Any) -> None:
        del ctx
        wide = ir.IntegerType.get_signless(64)
        begin = times(_block(), share)
        left = arith.subi(single(nbytes), begin)
        one = arith.cmpi(arith.CmpIPredicate.eq, _thread(), word(0))
        with utils.when(one):
            base = arith.muli(arith.extsi(wide, single(slab)), mgpu.c(whole, wide))
            base = arith.addi(base, arith.addi(arith.extui(wide, begin), mgpu.c(first, wide)))
            for piece in range(0, share, MOST):
                size = arith.minsi(arith.subi(left, word(piece)), word(min(MOST, share - piece)))
                place = arith.addi(base, mgpu.c(piece, wide))
                asm(
                    "{ .reg .pred p; setp.gt.s32 p, $1, 0; "
                    "@p cp.async.bulk.prefetch.L2.global [$0], $1; }",
                    [], [pointer(ref, place), size], "l,r",
                )  # fmt: skip

    call = plgpu.inline_mgpu(arg_types=(PLAIN, SPLAT, SPLAT))(run)
    call(ref, jnp.int32(slab), jnp.int32(nbytes))


def _thread() -> Any:
    """Of its warpgroup."""
    return arith.andi(utils.thread_idx(), word(127))


def _block() -> Any:
    """The block's number in the grid."""
    x, y, z, wide, high = (
        asm_word(f"mov.u32 $0, %{name};", movable=True)
        for name in ("ctaid.x", "ctaid.y", "ctaid.z", "nctaid.x", "nctaid.y")
    )
    return plus(x, arith.muli(wide, plus(y, arith.muli(high, z))))
