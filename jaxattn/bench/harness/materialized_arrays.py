"""Large arrays that a compiled step writes to memory: a matrix that was copied or turned is one.

`aliasing.check_aliasing` names what is copied as it is. This counts every result, so that a matrix
that XLA multiplied by one token, and wrote out before it took the sum, is found too.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from jaxattn.aliasing.hlo import FREE, UPDATES, HloInstruction, HloModule

LEAST = 2**20  # bytes
# What moves no data, and what runs its own instructions.
NOTHING = FREE | {"parameter", "tuple", "get-tuple-element", "constant"}
WORKSPACE = "s8["  # what XLA gives to cuBLAS


class MaterializedArray(NamedTuple):
    """A result.

    Attributes:
        array: its dtype and shape.
        loop: whether each time round a loop, not once a step.
    """

    array: str
    nbytes: int
    loop: bool
    instruction: str
    op_name: str

    def __str__(self) -> str:
        often = "each time round" if self.loop else "once"
        return f"{self.array}, {self.nbytes / 2**20:.1f} MiB {often} ({self.instruction})"


def materialized_arrays(text: str, *, least: int = LEAST) -> list[MaterializedArray]:
    """The results of `least` bytes and more that are not updates in place, the largest first.

    Args:
        text: of an optimised HLO module.
    """
    module = HloModule(text)
    found = list(_of(module, module.entry, loop=False, least=least))
    return sorted(found, key=lambda each: (not each.loop, -each.nbytes))


def _of(module: HloModule, name: str, *, loop: bool, least: int) -> Iterator[MaterializedArray]:
    for each in module.computations.get(name, {}).values():
        if each.opcode == "while":
            yield from _of(module, each.body, loop=True, least=least)
        elif each.opcode in ("call", "conditional"):
            for called in each.called:
                yield from _of(module, called, loop=loop, least=least)
        elif each.opcode.endswith("-start"):
            continue  # the result is its "-done"
        elif each.opcode not in NOTHING and not _in_place(module, each):
            nbytes = dataclasses.replace(each, type=each.array).nbytes
            if nbytes >= least and not each.array.startswith(WORKSPACE):
                yield MaterializedArray(each.array, nbytes, loop, each.name, each.op_name)


def _in_place(module: HloModule, each: HloInstruction) -> bool:
    """Whether it writes part of an array that was there before."""
    roots = [module.roots[name].opcode for name in each.called if name in module.roots]
    return bool(each.aliases) or each.opcode in UPDATES or bool(UPDATES.intersection(roots))
