"""Transfers over peer memory: GPUs write parts of tokens into one another's inboxes.

    inbox      int32 [2, N, T, F]   the parts of N GPUs; calls take its two sides in turn
    counts     int32 [1, T, 1]      of each token: the calls that this GPU has ended
    addresses  int32 [N + 1, 2]     of the inbox on each GPU, the lower word first; then this GPU's
                                    number

JAX has peer refs for a kernel. With them XLA synchronizes all GPUs' threads on the host, and copies
addresses to the device, before every launch of every step. An inbox stays in place as long as its
engine lives, so its addresses are written once. A launch that receives an inbox at another address,
such as a copy, ends the program with an error.

Two numbers of a part and the number of the call are eight bytes, which memory always updates as a
whole. A thread polls the eight bytes that the same thread of another GPU writes, until they have
this call's number. So no signal follows the parts, and no fence waits for them to arrive.

A GPU writes into a side again only after all parts of the call in between have arrived. A GPU that
has sent one of these had read the side before: its launch of the earlier call had ended. So calls
that share an inbox may send parts of different sizes. Counts continue from call to call, so nothing
is reset. If a peer never runs, or a debugger holds it, the kernel polls for its part `MOST_TURNS`
times, and then ends the program with an error.

After 2^32 calls a number repeats. By then a step's calls have overwritten everything that they
poll, because calls of one size take the same side each time.

A launch may have more CTAs than a GPU runs at once. Each sends before it waits, and a GPU starts
CTAs in the order of their indices. Of all CTAs that wait, consider the one with the lowest index:
each GPU has ended those before it, so it runs this one too, and has sent its part.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.hopper.device import require_hopper
from jaxattn.kernels.hopper.mlir import arith, ir, llvm, mgpu, scf, utils, vector
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
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
BYTES = 4  # of the inbox per number that is sent, including half of a call's number
MOST_BYTES = 2**31 - 1  # of the inbox, whose indices are words
NUMBERS = 2  # sent together with one call's number
LOADS = 16  # of 16 bytes that a thread polls at a time
MOST_TURNS = 2**26  # polls by a thread
# XLA would otherwise synchronize all GPUs before the launch, as for semaphores that it has set to
# zero.
COMPILER = plgpu.CompilerParams(
    approx_math=True,
    skip_device_barrier=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,  # in which PTX can address a peer's memory
)
SPLAT, PLAIN = plgpu.Layout.WG_SPLAT, plgpu.RefType()
# The numbers of a piece of an attention's output that is sent with its log-sum-exp: two per thread.
STATE_DIMS = NUMBERS * THREADS
STATE = plgpu.Layout.WG_STRIDED((STATE_DIMS,), vec_size=NUMBERS)


def i64() -> Any:
    return ir.IntegerType.get_signless(64)


def supports_features(features: int, most: int) -> bool:
    """Whether a part may have `features` numbers."""
    return features % (NUMBERS * THREADS) == 0 < features <= most


def layout_of(features: int) -> Any:
    """Returns a warpgroup's register layout of a part of `features` numbers."""
    return plgpu.Layout.WG_STRIDED((features,), vec_size=_together(features))


def _together(features: int) -> int:
    """Returns the numbers of a part that are adjacent in a thread."""
    return next(n for n in (8, 4, 2) if features % (n * THREADS) == 0)


def check(op: str, inbox: jax.Array, axes: tuple[str, ...], interpret: bool) -> None:
    """Refuses anything but a mailbox of all GPUs of the mesh, in one process.

    Raises:
        Refusal: The error contains the reason.
    """
    if interpret:
        raise Refusal(f"{op}: JAX's interpreter does not support peer memory")
    require_hopper(op, interpret=False)
    if (processes := jax.process_count()) > 1:
        raise Refusal(
            f"{op}: the kernel needs GPUs of a single process; these belong to {processes} "
            "processes"
        )
    mesh = jax.sharding.get_abstract_mesh()
    if axes != mesh.axis_names:  # a GPU's number on these axes identifies its memory
        raise Refusal(
            f"{op}: the kernel needs all axes of the mesh, in its order; got {axes} of "
            f"{dict(mesh.shape)}"
        )
    if inbox.size * BYTES > MOST_BYTES:
        raise Refusal(
            f"{op}: the kernel needs an inbox of less than 2 GiB; inbox {inbox.shape} of the "
            f"mailbox has {inbox.size * BYTES} bytes; create the mailbox for fewer tokens"
        )


class PeerTransfer:
    """One call for a token, in a kernel's body: a warpgroup sends its part, and receives all.

    If several warpgroups send for a token, each to one GPU, each has its own place among the
    counts, `counted`: none reads a count that another has changed.
    """

    def __init__(
        self,
        inbox_ref: Any,
        counts_ref: Any,
        addresses_ref: Any,
        token: Any,
        features: int,
        counted: Any = None,
    ):
        self.inbox_ref, self.counts_ref, self.addresses_ref = inbox_ref, counts_ref, addresses_ref
        self.token, self.features, self.gpus = token, features, inbox_ref.shape[1]
        self.counted = token if counted is None else counted
        self.own = addresses_ref[self.gpus, 0]
        self.number = counts_ref[0, self.counted, 0] + 1
        self.side = self.number & 1  # also for negative numbers, which follow the largest

    def send(self, parts: Sequence[jax.Array]) -> None:
        """Sends a part to all GPUs, or one of several parts to each."""
        places = PLAIN, PLAIN, SPLAT, SPLAT, SPLAT, SPLAT
        layouts = [layout_of(self.features)] * len(parts)
        send = plgpu.inline_mgpu(arg_types=(*places, *layouts))(_send)
        of_call = self.number, self.side, self.own, self.token
        send(self.inbox_ref, self.addresses_ref, *of_call, *parts)

    def receive(self, loads: int = LOADS) -> tuple[jax.Array, ...]:
        """Returns each GPU's part, as soon as all have arrived; polls `loads` of 16 bytes at a
        time."""
        layout = layout_of(self.features)
        part = plgpu.ShapeDtypeStruct((self.features,), jnp.bfloat16, layout=layout)
        receive = plgpu.inline_mgpu(
            arg_types=(PLAIN, PLAIN, SPLAT, SPLAT, SPLAT), return_type=(part,) * self.gpus
        )(functools.partial(_receive, features=self.features, loads=loads))
        come: tuple[jax.Array, ...] = receive(
            self.inbox_ref, self.counts_ref, self.number, self.side, self.token
        )
        return come

    def address(self, gpu: Any) -> tuple[Any, Any]:
        """Returns the address of a GPU's inbox, the lower word first."""
        return self.addresses_ref[gpu, 0], self.addresses_ref[gpu, 1]

    def send_state(
        self, to: tuple[Any, Any], known: tuple[Any, Any], out: jax.Array, lse: Any
    ) -> None:
        """Sends a piece of an attention's output, [256] float32, to one GPU, rounded to bfloat16;
        each thread sends its two numbers together with the log-sum-exp. The piece has the size of a
        part of 512 numbers.

        Args:
            to: The address of that GPU's inbox.
            known: The address of this GPU's own inbox.
        """
        send = plgpu.inline_mgpu(arg_types=(PLAIN, *[SPLAT] * 9, STATE))(_send_state)
        of_call = self.number, self.side, self.own, self.token
        send(self.inbox_ref, *of_call, *to, *known, lse, out)

    def receive_states(self) -> list[tuple[jax.Array, jax.Array]]:
        """Returns the (piece, log-sum-exp) of each GPU, as soon as all have arrived."""
        piece = plgpu.ShapeDtypeStruct((STATE_DIMS,), jnp.float32, layout=STATE)
        lse = plgpu.ShapeDtypeStruct((), jnp.float32, layout=SPLAT)
        receive = plgpu.inline_mgpu(
            arg_types=(PLAIN, SPLAT, SPLAT, SPLAT), return_type=(piece, lse) * self.gpus
        )(_receive_states)
        come = receive(self.inbox_ref, self.number, self.side, self.token)
        return list(zip(come[::2], come[1::2], strict=True))

    def end(self) -> None:
        """Counts the call, which sends nothing more."""
        plgpu.inline_mgpu(arg_types=(PLAIN, SPLAT, SPLAT))(_end)(
            self.counts_ref, self.number, self.counted
        )


def _send(
    ctx: Any, inbox: Any, addresses: Any, call: Any, side: Any, own: Any, token: Any, *sent: Any
) -> None:
    """Writes a token's part into the inbox on each GPU, with the call's number.

    Args:
        sent: One part for all GPUs, or one for each.
    """
    del ctx
    call, side, own, token = (single(x) for x in (call, side, own, token))
    gpus, count = ir.MemRefType(inbox.type).shape[1], sent[0].registers.size * _words(sent[0])
    offset = _offset(inbox, side, own, token, count)
    of_each = _addresses(addresses, gpus)
    _trap_if_inbox_moved(inbox, _of(of_each, own))
    there = [arith.addi(address, offset) for address in of_each]
    for gpu, place in enumerate(there):
        part = sent[gpu % len(sent)]
        words = [
            element(vector.bitcast(ir.VectorType.get((_words(part),), i32()), each), place)
            for each in part.registers.flat
            for place in range(_words(part))
        ]
        _write(place, words, call)


def _send_state(ctx: Any, inbox: Any, *given: Any) -> None:
    """Writes two numbers of an output, and its log-sum-exp, into the inbox on one GPU.

    Args:
        given: call, side, own, token, the two addresses' words, the log-sum-exp, the output.
    """
    del ctx
    *scalars, out = given
    call, side, own, token, low, high, known_low, known_high, lse = map(single, scalars)
    to, known = (_address(*words) for words in ((low, high), (known_low, known_high)))
    _trap_if_inbox_moved(inbox, known)
    [numbers] = out.registers.flat
    rounded = arith.truncf(ir.VectorType.get((NUMBERS,), ir.BF16Type.get()), numbers)
    words = [
        element(vector.bitcast(ir.VectorType.get((1,), i32()), rounded), 0),
        arith.bitcast(i32(), lse),
    ]
    place = _offset(inbox, side, own, token, len(words))
    _write(arith.addi(to, place), words, call)


def _address(low: Any, high: Any) -> Any:
    return asm("mov.b64 $0, {$1, $2};", [i64()], [low, high], "=l,r,r", movable=True)[0]


def _addresses(addresses: Any, gpus: int) -> list[Any]:
    """Loads the address of the inbox on each GPU."""
    return [
        asm("ld.global.b64 $0, [$1];", [i64()], [pointer(addresses, word(8 * gpu))], "=l,l")[0]
        for gpu in range(gpus)
    ]


def _of(of_each: list[Any], gpu: Any) -> Any:
    """Selects a GPU's address among those of all."""
    found = of_each[0]
    for number, address in enumerate(of_each[1:], 1):
        equal = arith.cmpi(arith.CmpIPredicate.eq, gpu, word(number))
        found = arith.select(equal, address, found)
    return found


def _write(first: Any, words: list[Any], call: Any) -> None:
    """Writes a thread's words, from a place on, each with the call's number."""
    wide = 2 - len(words) % 2
    if wide == 1:
        code = "{ .reg .b64 a; mov.b64 a, {$1, $2}; st.relaxed.sys.global.b64 [$0], a; }"
    else:
        code = (
            "{ .reg .b64 a, b; mov.b64 a, {$1, $3}; mov.b64 b, {$2, $3}; "
            "st.relaxed.sys.global.v2.b64 [$0], {a, b}; }"
        )
    constraints = ",".join(["l", *"r" * (wide + 1), "~{memory}"])
    for piece, place in enumerate(_places(first, len(words))):
        asm(code, [], [place, *words[piece * wide :][:wide], call], constraints)


def _trap_if_inbox_moved(inbox: Any, known: Any) -> None:
    """Ends the program with an error if this GPU's inbox is not where its peers write to.

    Without this check, a kernel that receives a copy of the inbox would wait forever.
    """
    here = llvm.ptrtoint(i64(), pointer(inbox, word(0)))
    code = "{ .reg .pred p; setp.ne.b64 p, $0, $1; @p trap; }"
    asm(code, [], [here, known], "l,l")


def _receive(
    ctx: Any,
    inbox: Any,
    counts: Any,
    call: Any,
    side: Any,
    token: Any,
    *,
    features: int,
    loads: int,
) -> tuple[Any, ...]:
    """Returns each GPU's part of a token, as soon as all have arrived; then counts the call.

    Args:
        features: Numbers of a part, no more than the inbox has room for.
        loads: Loads of 16 bytes at a time.
    """
    of_call = (single(x) for x in (call, side, token))
    words = _await_parts(inbox, *of_call, features=features, loads=loads)
    _end(ctx, counts, call, token)
    gpus, together = ir.MemRefType(inbox.type).shape[1], _together(features)
    layout = mgpu.WGStridedFragLayout((features,), together)
    of = ir.VectorType.get((together,), ir.BF16Type.get())
    half = together // NUMBERS
    vectors = [vector.bitcast(of, joined(words[i : i + half])) for i in range(0, len(words), half)]
    each = len(vectors) // gpus
    return tuple(
        fragmented(vectors[gpu * each :][:each], (features,), layout) for gpu in range(gpus)
    )


def _receive_states(ctx: Any, inbox: Any, call: Any, side: Any, token: Any) -> tuple[Any, ...]:
    """Returns each GPU's piece and its log-sum-exp, one GPU after another."""
    del ctx
    of_call = (single(x) for x in (call, side, token))
    words = _await_parts(inbox, *of_call, features=NUMBERS * STATE_DIMS, loads=LOADS)
    layout = mgpu.WGStridedFragLayout((STATE_DIMS,), NUMBERS)
    narrow, wide = (
        ir.VectorType.get((NUMBERS,), of) for of in (ir.BF16Type.get(), ir.F32Type.get())
    )
    found = list[Any]()
    for numbers, lse in zip(words[::2], words[1::2], strict=True):
        piece = arith.extf(wide, vector.bitcast(narrow, joined([numbers])))
        found.append(fragmented([piece], (STATE_DIMS,), layout))
        found.append(mgpu.FragmentedArray.splat(arith.bitcast(ir.F32Type.get(), lse), ()))
    return tuple(found)


def _await_parts(
    inbox: Any, call: Any, side: Any, token: Any, *, features: int, loads: int
) -> list[Any]:
    """Returns a thread's words of each GPU's part of a token, as soon as all have arrived."""
    gpus = ir.MemRefType(inbox.type).shape[1]
    count = features // (NUMBERS * THREADS)
    wide = 2 - count % 2
    group = max(1, loads * wide // count)
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
    return words


def _end(ctx: Any, counts: Any, call: Any, counted: Any) -> None:
    """Counts the call."""
    del ctx
    utils.warpgroup_barrier()  # all threads have read the count
    with utils.when(arith.cmpi(arith.CmpIPredicate.eq, WarpgroupThread().index, word(0))):
        store(single(call), counts, times(single(counted), 4))


def _words(part: Any) -> int:
    """Returns the words in a register of a part, which has several bfloat16."""
    return ir.VectorType(part.registers.flat[0].type).shape[0] // NUMBERS


def _offset(inbox: Any, side: Any, gpu: Any, token: Any, words: int) -> Any:
    """Returns the byte offset in an inbox of a thread's first word of a GPU's part of a token.

    Neighboring threads have adjacent words, two each if their number is even.
    """
    _, gpus, tokens, features = ir.MemRefType(inbox.type).shape
    row = plus(times(plus(times(side, gpus), gpu), tokens), token)
    wide = 8 * (2 - words % 2)  # bytes
    return arith.extui(
        i64(), plus(times(row, features * BYTES), times(WarpgroupThread().index, wide))
    )


def _places(first: Any, words: int) -> list[Any]:
    """Returns the addresses of a thread's words from the first on, in pairs if their number is
    even."""
    wide = 8 * (2 - words % 2)  # bytes
    pieces = range(words * 8 // wide)
    return [arith.addi(first, mgpu.c(piece * THREADS * wide, i64())) for piece in pieces]


def _pieces(place: Any, words: int) -> list[tuple[Any, Any]]:
    """Loads `words` words at a place, each with the call's number that it arrived with."""
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
