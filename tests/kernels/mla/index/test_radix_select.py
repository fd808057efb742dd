"""The instructions of the radix select, one by one on NumPy, for all threads of a cluster at once.

The interpreter runs no instructions of our own. Here each method of `RadixSelect` writes arrays of
all threads' words instead, in lockstep: barriers are asserted to be met by every thread.
"""

import contextlib
import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest

from jaxattn.kernels.mla.index import radix_select
from jaxattn.kernels.mla.index.radix_select import THREADS, WORDS, RadixSelect

NOTHING = -7


@dataclasses.dataclass(frozen=True)
class SimulatedRef:
    """Words in memory; of shared memory each block has a row."""

    name: str
    words: np.ndarray
    type: tuple[int, ...] = ()


class SimulatedCluster:
    """A cluster's threads: what `radix_select` imports, on arrays with a word of each thread."""

    def __init__(self, keys: np.ndarray, count: int, blocks: int) -> None:
        size = blocks * THREADS
        self.thread, self.block = np.arange(size) % THREADS, np.arange(size) // THREADS
        self.active = np.ones(size, bool)
        self.keys = SimulatedRef("keys", keys.reshape(-1), keys.shape)
        self.out = SimulatedRef("out", np.full(keys.shape[0] * count, NOTHING))
        self.smem = SimulatedRef("smem", np.full((blocks, WORDS), 0xDEAD, np.uint32))

    def word(self, value: int) -> np.ndarray:
        return np.full(len(self.active), value & 0xFFFFFFFF, np.uint32)

    def names(self) -> dict[str, object]:
        def signed(x):
            return x.view(np.int32)

        predicates = SimpleNamespace(
            eq=np.equal, ne=np.not_equal, ult=np.less, uge=np.greater_equal,
            sgt=lambda x, y: signed(x) > signed(y),
        )  # fmt: skip
        arith = SimpleNamespace(
            andi=np.bitwise_and, ori=np.bitwise_or, shli=np.left_shift, shrui=np.right_shift,
            addi=np.add, subi=np.subtract, muli=np.multiply, divui=np.floor_divide,
            minui=np.minimum, select=np.where, CmpIPredicate=predicates,
            cmpi=lambda of, x, y: of(x, y),
            shrsi=lambda x, y: (signed(x) >> signed(y)).view(np.uint32),
            extui=lambda bits, x: x.astype(f"uint{bits}"),
        )  # fmt: skip
        return {
            "arith": arith,
            "ir": SimpleNamespace(
                IntegerType=SimpleNamespace(get_signless=lambda bits: bits),
                MemRefType=lambda shape: SimpleNamespace(shape=shape),
            ),
            "llvm": SimpleNamespace(ptrtoint=lambda bits, at: at.astype(f"uint{bits}")),
            "utils": SimpleNamespace(
                thread_idx=lambda: self.thread.astype(np.uint32), when=self.when, fori=self.fori
            ),
            "pointer": lambda ref, offset, fixed=0: offset + np.uint32(fixed),
            "plus": lambda first, *more: sum(more, first),
            "times": lambda x, by: x * np.uint32(by),
            "i32": lambda: 32,
            "joined": lambda values: values,
        } | {name: getattr(self, name) for name in ("word", "load", "store", "asm")}

    @contextlib.contextmanager
    def when(self, condition):
        before, self.active = self.active, self.active & condition
        yield
        self.active = before

    def fori(self, bound, carry):
        assert (bound == bound[0]).all()

        def run(step):
            some = carry
            for i in range(int(bound[0])):
                some = step(self.word(i), some)
            return SimpleNamespace(results=some)

        return run

    def load(self, ref, offset, fixed, words):
        at = (offset + np.uint32(fixed)).astype(np.int64)
        assert (at % (4 * words) == 0).all(), "not aligned"
        rows = (self.block,) if ref is self.smem else ()
        return [ref.words[(*rows, at // 4 + i)].view(np.uint32) for i in range(words)]

    def store(self, values, ref, offset, fixed=0):
        assert ref is self.smem
        some, at = self.active, (offset + np.uint32(fixed)) // 4
        for i, value in enumerate(values if isinstance(values, list) else [values]):
            ref.words[self.block[some], at[some] + i] = value[some]

    def asm(self, code, results, operands, constraints, **_):
        if code == radix_select.COUNT:
            at, counted = operands
            some = self.active & (counted != 0)
            np.add.at(self.smem.words, (self.block[some], at[some] // 4), np.uint32(1))
        elif code == radix_select.WRITE:
            at, value, written = operands
            some = self.active & (written != 0)
            places = at[some].astype(np.int64) // 4
            assert (self.out.words[places] == NOTHING).all() and np.unique(places).size == len(
                places
            ), "a place is written twice"
            self.out.words[places] = value[some]
        elif code in radix_select.OF_BLOCK.values():
            at, block = operands
            return [self.smem.words[block, at // 4 + i] for i in range(len(results))]
        elif "shfl.sync" in code:
            (lanes,) = (x.reshape(-1, 32) for x in operands)
            distance = int(re.findall(r"\$1, (\d+)", code)[0])
            if "shfl.sync.idx" in code:
                return [np.repeat(lanes[:, distance], 32)]
            if "shfl.sync.bfly" in code:
                return [lanes[:, np.arange(32) ^ distance].reshape(-1)]
            moved = np.zeros_like(lanes)
            if "shfl.sync.up" in code:
                moved[:, distance:] = lanes[:, :-distance]
            else:
                moved[:, :-distance] = lanes[:, distance:]
            return [(lanes + moved).reshape(-1)]
        elif "redux.sync.add" in code:
            return [np.repeat(operands[0].reshape(-1, 32).sum(axis=1, dtype=np.uint32), 32)]
        else:
            assert "barrier" in code and self.active.all() == self.active.any()
        return []


@pytest.mark.parametrize(
    ("width", "blocks", "visible", "count"),
    [
        (4096, 1, 513, 512),
        (49152, 1, 48001, 2048),
        (8192, 2, 8000, 1024),
        (12288, 3, 12001, 512),
        (131072, 4, 9999, 512),
    ],
    ids=["in-registers", "in-turns", "two-blocks", "three-blocks", "four-blocks"],
)
def test_the_first_of_equal_numbers_are_taken(width, blocks, visible, count, monkeypatch, request):
    in_turns = request.node.callspec.id == "in-turns"
    drawn = np.random.default_rng(0).normal(size=(3, width)).astype(np.float32)
    least = np.full(drawn.shape, -2, np.int32).view(np.float32)  # the lowest key of all
    least[:, ::9] = drawn[:, ::9]
    for numbers in (drawn, np.round(drawn * 2), np.full_like(drawn, -1.5), least):
        bits = (numbers + np.float32(0)).view(np.int32)
        keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        cluster = SimulatedCluster(keys, count, blocks)
        for name, value in cluster.names().items():
            monkeypatch.setattr(radix_select, name, value)
        given = cluster.word(1), cluster.word(visible), cluster.block.astype(np.uint32)
        some = cluster.keys, cluster.out, cluster.smem
        selected = RadixSelect(*some, *given, top_k=count, blocks=blocks)
        selected.run()
        assert selected.resident != in_turns
        out = cluster.out.words.reshape(3, count)
        expected = np.sort(np.argsort(-keys[1, :visible].astype(np.int64), kind="stable")[:count])
        np.testing.assert_array_equal(out[1], expected)
        assert (out[[0, 2]] == NOTHING).all()
