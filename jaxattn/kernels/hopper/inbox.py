"""Parts of tokens that GPUs send each other: they write into inboxes in one another's memory.

    inbox      int32 [2, N, T, F]   the parts of N GPUs; calls take its two sides in turn
    counts     int32 [1, T, 1]      of each token: the calls that this GPU has ended
    addresses  int32 [N + 1, 2]     of the inbox on each GPU, the lower word first; then this GPU's
                                    number

JAX has peer references for a kernel. With them XLA meets all GPUs' threads on the host, and copies
addresses to the device, for every launch of every step before it begins. An inbox stays where it is
as long as its engine lives, so its addresses are written down once. A launch that is given an inbox
elsewhere, as a copy would be, ends the program with an error.

Two numbers of a part and the number of the call are eight bytes, which memory never shows in part.
A thread reads the eight bytes that the same thread of another GPU wrote, until they have this
call's number. So nothing is signalled behind the parts, and no fence waits for them to arrive.

A GPU writes into a side again only after all parts of the call between have come. Whoever has sent
one of these has read the side before: its launch of that call had ended. So calls that share an
inbox may send parts of different sizes. Counts go on from call to call, so nothing is reset. If a
peer never runs, or a debugger holds it, the kernel looks for its part `MOST_TURNS` times, and then
ends the program with an error.

After 2^32 calls a number comes again. By then a step's calls have written all that they look at, as
those of one size take the same side each time.

A launch may have more blocks than a GPU runs at once. Each sends before it waits, and a GPU begins
blocks in the order of their numbers. Of all blocks that wait, take the one of the lowest number:
each GPU has ended those before it, so it runs this one too, and has sent its part.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.hopper.machine import require_hopper
from jaxattn.kernels.hopper.mlir import arith, ir, llvm, mgpu, scf, utils, vector
from jaxattn.kernels.hopper.registers import (
    Thread,
    asm,
    element,
    fragmented,
    i32,
    joined,
    plus,
    pointer,
    single,
    store,
    times,
    word,
)

MOST_GPUS = 8
THREADS = 128
BYTES = 4  # of the inbox for a number that is sent, half of a call's number included
MOST_BYTES = 2**31 - 1  # of the inbox, whose places are words
NUMBERS = 2  # that a call's number is sent with
LOADS = 16  # of 16 bytes that a thread waits for at a time
MOST_TURNS = 2**26  # that a thread looks for them
# XLA would let all GPUs meet before the launch, as for semaphores that it has set to zero.
COMPILER = plgpu.CompilerParams(
    approx_math=True,
    skip_device_barrier=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,  # where PTX can name a peer's memory
)
SPLAT, PLAIN = plgpu.Layout.WG_SPLAT, plgpu.RefType()


def i64() -> Any:
    return ir.IntegerType.get_signless(64)


def sent(features: int, most: int) -> bool:
    """Whether a part may have so many numbers."""
    return features % (NUMBERS * THREADS) == 0 < features <= most


def layout_of(features: int) -> Any:
    """How a warpgroup has a part of so many numbers."""
    return plgpu.Layout.WG_STRIDED((features,), vec_size=_together(features))


def _together(features: int) -> int:
    """Numbers of a part that lie side by side in a thread."""
    return next(n for n in (8, 4, 2) if features % (n * THREADS) == 0)


def check(op: str, inbox: jax.Array, axes: tuple[str, ...], interpret: bool) -> None:
    """Refuses what is no mailbox of all GPUs of the mesh, in one process.

    Raises:
        Refusal: it says why.
    """
    if interpret:
        raise Refusal(f"{op}: JAX's interpreter knows no memory of peers")
    require_hopper(op, interpret=False)
    if (processes := jax.process_count()) > 1:
        raise Refusal(f"{op}: the kernel's GPUs are of one process; these are of {processes}")
    mesh = jax.sharding.get_abstract_mesh()
    if axes != mesh.axis_names:  # a GPU's number there names its memory
        raise Refusal(
            f"{op}: the kernel needs all axes of the mesh, in its order; got {axes} of "
            f"{dict(mesh.shape)}"
        )
    if inbox.size * BYTES > MOST_BYTES:
        raise Refusal(
            f"{op}: the kernel's inbox has less than 2 GiB; inbox {inbox.shape} of the mailbox has "
            f"{inbox.size * BYTES} bytes; make the mailbox for fewer tokens"
        )


class Call:
    """One call for a token, in a kernel's body: a warpgroup sends its part, and receives all."""

    def __init__(
        self, inbox_ref: Any, counts_ref: Any, addresses_ref: Any, token: Any, features: int
    ):
        self.inbox_ref, self.counts_ref, self.addresses_ref = inbox_ref, counts_ref, addresses_ref
        self.token, self.features, self.gpus = token, features, inbox_ref.shape[1]
        self.own = addresses_ref[self.gpus, 0]
        self.number = counts_ref[0, token, 0] + 1
        self.side = self.number & 1  # of negative numbers, which follow the largest, too

    def send(self, parts: Sequence[jax.Array]) -> None:
        """Sends a part to all GPUs, or of several one to each."""
        places = PLAIN, PLAIN, SPLAT, SPLAT, SPLAT, SPLAT
        layouts = [layout_of(self.features)] * len(parts)
        send = plgpu.inline_mgpu(arg_types=(*places, *layouts))(_send)
        of_call = self.number, self.side, self.own, self.token
        send(self.inbox_ref, self.addresses_ref, *of_call, *parts)

    def receive(self) -> tuple[jax.Array, ...]:
        """Each GPU's part, as soon as all are there."""
        layout = layout_of(self.features)
        part = plgpu.ShapeDtypeStruct((self.features,), jnp.bfloat16, layout=layout)
        receive = plgpu.inline_mgpu(
            arg_types=(PLAIN, PLAIN, SPLAT, SPLAT, SPLAT), return_type=(part,) * self.gpus
        )(functools.partial(_receive, features=self.features))
        come: tuple[jax.Array, ...] = receive(
            self.inbox_ref, self.counts_ref, self.number, self.side, self.token
        )
        return come


def _send(
    ctx: Any, inbox: Any, addresses: Any, call: Any, side: Any, own: Any, token: Any, *sent: Any
) -> None:
    """Writes a token's part into the inbox on each GPU, with the call's number.

    Args:
        sent: one for all GPUs, or one for each.
    """
    del ctx
    call, side, own, token = (single(x) for x in (call, side, own, token))
    gpus, count = ir.MemRefType(inbox.type).shape[1], sent[0].registers.size * _words(sent[0])
    wide = 2 - count % 2
    if wide == 1:
        code = "{ .reg .b64 a; mov.b64 a, {$1, $2}; st.relaxed.sys.global.b64 [$0], a; }"
    else:
        code = (
            "{ .reg .b64 a, b; mov.b64 a, {$1, $3}; mov.b64 b, {$2, $3}; "
            "st.relaxed.sys.global.v2.b64 [$0], {a, b}; }"
        )
    constraints = ",".join(["l", *"r" * (wide + 1), "~{memory}"])
    offset = _offset(inbox, side, own, token, count)
    of_each = [
        asm("ld.global.b64 $0, [$1];", [i64()], [pointer(addresses, word(8 * gpu))], "=l,l")[0]
        for gpu in range(gpus)
    ]
    _must_be_at(inbox, of_each, own)
    there = [_places(arith.addi(address, offset), count) for address in of_each]
    for gpu, places in enumerate(there):
        part = sent[gpu % len(sent)]
        words = [
            element(vector.bitcast(ir.VectorType.get((_words(part),), i32()), each), place)
            for each in part.registers.flat
            for place in range(_words(part))
        ]
        for piece, place in enumerate(places):
            asm(code, [], [place, *words[piece * wide :][:wide], call], constraints)


def _must_be_at(inbox: Any, of_each: list[Any], own: Any) -> None:
    """Ends the program with an error where this GPU's inbox is not where its peers write to.

    Without it, a kernel that was given a copy of the inbox would wait for ever.
    """
    known = of_each[0]
    for gpu, address in enumerate(of_each[1:], 1):
        equal = arith.cmpi(arith.CmpIPredicate.eq, own, word(gpu))
        known = arith.select(equal, address, known)
    here = llvm.ptrtoint(i64(), pointer(inbox, word(0)))
    code = "{ .reg .pred p; setp.ne.b64 p, $0, $1; @p trap; }"
    asm(code, [], [here, known], "l,l")


def _receive(
    ctx: Any, inbox: Any, counts: Any, call: Any, side: Any, token: Any, *, features: int
) -> tuple[Any, ...]:
    """Each GPU's part of a token, as soon as all are there; then the call is counted.

    Args:
        features: numbers of a part, no more than the inbox has room for.
    """
    del ctx
    call, side, token = (single(x) for x in (call, side, token))
    gpus = ir.MemRefType(inbox.type).shape[1]
    count = features // (NUMBERS * THREADS)
    wide = 2 - count % 2
    group = max(1, LOADS * wide // count)
    here = llvm.ptrtoint(i64(), pointer(inbox, word(0)))
    words: list[Any] = []
    for first in range(0, gpus, group):
        waited = range(first, min(first + group, gpus))
        come_types = [i32()] * (len(waited) * count)
        loop = scf.WhileOp([*come_types, i32()], [word(0)])
        with ir.InsertionPoint(loop.before.blocks.append(i32())):
            turn = loop.before.blocks[0].arguments[0]
            asm(
                "{ .reg .pred p; setp.gt.s32 p, $0, $1; @p trap; }",
                [],
                [turn, word(MOST_TURNS)],
                "r,r",
            )
            come, missing = list[Any](), word(0)
            for gpu in waited:
                offset = _offset(inbox, side, word(gpu), token, count)
                for place in _places(arith.addi(here, offset), count):
                    for number, marked in _pieces(place, wide):
                        come.append(number)
                        missing = arith.ori(missing, arith.xori(marked, call))
            again = arith.cmpi(arith.CmpIPredicate.ne, missing, word(0))
            scf.condition(again, [*come, plus(turn, word(1))])
        with ir.InsertionPoint(loop.after.blocks.append(*come_types, i32())):
            scf.yield_([loop.after.blocks[0].arguments[-1]])
        words += list(loop.results)[:-1]
    utils.warpgroup_barrier()  # all threads have read the count
    with utils.when(arith.cmpi(arith.CmpIPredicate.eq, Thread().index, word(0))):
        store(call, counts, times(token, 4))
    together = _together(features)
    layout = mgpu.WGStridedFragLayout((features,), together)
    of = ir.VectorType.get((together,), ir.BF16Type.get())
    half = together // NUMBERS
    vectors = [vector.bitcast(of, joined(words[i : i + half])) for i in range(0, len(words), half)]
    each = len(vectors) // gpus
    return tuple(
        fragmented(vectors[gpu * each :][:each], (features,), layout) for gpu in range(gpus)
    )


def _words(part: Any) -> int:
    """In a register of a part, which is of several bfloat16."""
    return ir.VectorType(part.registers.flat[0].type).shape[0] // NUMBERS


def _offset(inbox: Any, side: Any, gpu: Any, token: Any, words: int) -> Any:
    """Bytes from an inbox's beginning to the first of a thread's words of a GPU's part of a token.

    What neighbouring threads have lies side by side, two words each if they are even.
    """
    _, gpus, tokens, features = ir.MemRefType(inbox.type).shape
    row = plus(times(plus(times(side, gpus), gpu), tokens), token)
    wide = 8 * (2 - words % 2)  # bytes
    return arith.extui(i64(), plus(times(row, features * BYTES), times(Thread().index, wide)))


def _places(first: Any, words: int) -> list[Any]:
    """The addresses of a thread's words from the first on, two by two if they are even."""
    wide = 8 * (2 - words % 2)  # bytes
    pieces = range(words * 8 // wide)
    return [arith.addi(first, mgpu.c(piece * THREADS * wide, i64())) for piece in pieces]


def _pieces(place: Any, words: int) -> list[tuple[Any, Any]]:
    """So many words at a place, each with the call's number that it came with."""
    if words == 1:
        code = "{ .reg .b64 a; ld.relaxed.sys.global.b64 a, [$2]; mov.b64 {$0, $1}, a; }"
    else:
        code = (
            "{ .reg .b64 a, b; ld.relaxed.sys.global.v2.b64 {a, b}, [$4]; mov.b64 {$0, $1}, a; "
            "mov.b64 {$2, $3}, b; }"
        )
    constraints = ",".join(["=r"] * (2 * words) + ["l", "~{memory}"])
    found = asm(code, [i32()] * (2 * words), [place], constraints)
    return list(zip(found[::2], found[1::2], strict=True))
