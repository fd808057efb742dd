"""Bytes of global memory brought into the L2 cache for kernels that run later.

Nothing waits for them: a thread sends its requests off, and may end before they are answered.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.ahead import Ahead
from jaxattn.core.layers import taken_apart
from jaxattn.kernels.hopper.mlir import arith, ir, llvm, mgpu, utils
from jaxattn.kernels.hopper.registers import Thread, asm, plus, pointer, single, times, word

PIECE = 2048  # bytes of a request, at most
THREADS = 128
ASK = "cp.async.bulk.prefetch.L2.global [$0], $1;"


class Prefetch:
    """What the blocks of a launch ask for together, each its share.

    `inputs` are the launch's, under names of their own.
    """

    def __init__(self, ahead: Sequence[Ahead], *, interpret: bool) -> None:
        self.ahead = () if interpret else tuple(ahead)  # which has no cache
        self.layers = [taken_apart(each.layer) for each in self.ahead]

    def inputs(self) -> dict[str, Any]:
        numbers = [jnp.asarray(first, jnp.int32).reshape(1) for first, *_ in self.layers]
        return {
            "ahead_refs": tuple(each.weights for each in self.ahead) or None,
            "ahead_layers": tuple(numbers) or None,
        }

    def ask(self, refs: Any, layers: Any, share: jax.Array, shares: int) -> None:
        """A block's share of all requests, of one warpgroup."""
        for each, (_, affine, _), ref, layer in zip(
            self.ahead, self.layers, refs or (), layers or (), strict=True
        ):
            number = layer[0] * affine[0] + affine[1]
            split = plgpu.Layout.WG_SPLAT
            request = _Request(*each.span, shares)
            ask = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), split, split))(request)
            ask(ref, number, share)


class _Request:
    """The code of a thread's requests for one span."""

    def __init__(self, of_layer: int, first: int, size: int, shares: int) -> None:
        self.of_layer, self.first, self.shares = of_layer, first, shares
        self.piece = math.gcd(math.gcd(size, first), PIECE)
        self.pieces = size // self.piece

    def __call__(self, ctx: Any, ref: Any, layer: Any, share: Any) -> None:
        del ctx
        wide = ir.IntegerType.get_signless(64)
        layer, share = single(layer), single(share)
        begin = arith.muli(arith.extsi(wide, layer), mgpu.c(self.of_layer, wide))
        mine = plus(times(share, THREADS), Thread().index)
        together = self.shares * THREADS
        for turn in range(-(-self.pieces // together)):
            number = plus(mine, word(turn * together))
            there = arith.cmpi(arith.CmpIPredicate.ult, number, word(self.pieces))
            with utils.when(there):
                offset = arith.muli(arith.extui(wide, number), mgpu.c(self.piece, wide))
                offset = arith.addi(arith.addi(begin, offset), mgpu.c(self.first, wide))
                place = llvm.ptrtoint(wide, pointer(ref, offset))
                asm(ASK, [], [place, word(self.piece)], "l,r")
