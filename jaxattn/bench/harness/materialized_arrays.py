"""Large arrays that a compiled step writes to memory, such as a copied or transposed matrix.

`aliasing.check_aliasing` names plain copies. This module lists every large result. So it also finds
a matrix that XLA multiplied by one token and stored before it computed the sum.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from jaxattn.aliasing.hlo import FREE, UPDATES, HloInstruction, HloModule

LEAST = 2**20  # bytes
# Opcodes that move no data, and those whose called computations are searched instead.
NOTHING = FREE | {"parameter", "tuple", "get-tuple-element", "constant"}
WORKSPACE = "s8["  # the type of the workspaces that XLA gives to cuBLAS


class MaterializedArray(NamedTuple):
    """A result that an instruction writes to memory.

    Attributes:
        array: The dtype and shape.
        nbytes: The size in bytes.
        loop: Whether a loop writes it in each iteration, rather than once per step.
        instruction: The name of the HLO instruction.
        op_name: The `op_name` in the instruction's metadata.
    """

    array: str
    nbytes: int
    loop: bool
    instruction: str
    op_name: str

    def __str__(self) -> str:
        often = "in each iteration" if self.loop else "once"
        return f"{self.array}, {self.nbytes / 2**20:.1f} MiB {often} ({self.instruction})"


def materialized_arrays(text: str, *, min_bytes: int = LEAST) -> list[MaterializedArray]:
    """Returns the results of at least `min_bytes` bytes that are not updated in place.

    Results inside loops come first, then larger ones before smaller ones.

    Args:
        text: The text of an optimized HLO module.
    """
    module = HloModule(text)
    found = list(_of(module, module.entry, loop=False, min_bytes=min_bytes))
    return sorted(found, key=lambda each: (not each.loop, -each.nbytes))


def _of(module: HloModule, name: str, *, loop: bool, min_bytes: int) -> Iterator[MaterializedArray]:
    for each in module.computations.get(name, {}).values():
        if each.opcode == "while":
            yield from _of(module, each.body, loop=True, min_bytes=min_bytes)
        elif each.opcode in ("call", "conditional"):
            for called in each.called:
                yield from _of(module, called, loop=loop, min_bytes=min_bytes)
        elif each.opcode.endswith("-start"):
            continue  # the matching "-done" instruction is counted
        elif each.opcode not in NOTHING and not _in_place(module, each):
            nbytes = dataclasses.replace(each, type=each.array).nbytes
            if nbytes >= min_bytes and not each.array.startswith(WORKSPACE):
                yield MaterializedArray(each.array, nbytes, loop, each.name, each.op_name)


def _in_place(module: HloModule, each: HloInstruction) -> bool:
    """Returns whether the instruction writes into part of an existing array."""
    roots = [module.roots[name].opcode for name in each.called if name in module.roots]
    return bool(each.aliases) or each.opcode in UPDATES or bool(UPDATES.intersection(roots))
