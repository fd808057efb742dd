"""The all-reduces of a compiled step, read from its HLO: their number and their form."""

import dataclasses
import math
import re

# XLA's own kernel takes one array of a multiple of 16 bytes, up to 4 MiB; NCCL takes the rest.
ALIGNED, MOST_BYTES = 16, 4 * 2**20
SCOPE = "sum_over_gpus"

_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "pred": 1, "f64": 8, "s64": 8}
_CALL = re.compile(
    r"(?P<name>%?[\w.-]+) = (?P<result>\([^=]*?\)|\S+) all-reduce(?P<start>-start)?\("
    r"(?P<operands>[^)]*)\)(?P<rest>.*)"
)
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<shape>[\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class HloAllReduce:
    """An all-reduce instruction.

    Attributes:
        name: The name of the instruction.
        operands: The number of arrays that it sums; XLA's combiner may join several.
        dtypes: The dtypes of the arrays.
        nbytes: The bytes of all arrays.
        origin: The named scopes of its origin.
        config: XLA's backend configuration, which describes how it runs.
    """

    name: str
    operands: int
    dtypes: tuple[str, ...]
    nbytes: int
    origin: str
    config: str

    @property
    def of_layers(self) -> bool:
        """Whether it sums a layer's outputs (`collectives.all_reduce`), not a sampler's values."""
        return SCOPE in self.origin

    @property
    def serves(self) -> bool:
        """Whether XLA's own kernel takes its form."""
        return (
            self.operands == 1
            and set(self.dtypes) <= {"f32", "bf16"}
            and self.nbytes % ALIGNED == 0
            and self.nbytes <= MOST_BYTES
        )


def all_reduces(text: str) -> list[HloAllReduce]:
    """Returns the all-reduces in a compiled step's HLO text, `compiled.as_text()`, in order."""
    found = []
    for line in text.splitlines():
        call = _CALL.search(line)
        if not call:
            continue
        arrays = _ARRAY.findall(call["result"])
        operands = call["operands"].count("%") or len(call["operands"].split(","))
        # The tuple of an asynchronous all-reduce has its operands, then its results.
        arrays = arrays[-operands:]
        sizes = (
            math.prod(int(side) for side in shape.split(",") if side) * _BYTES.get(dtype, 8)
            for dtype, shape in arrays
        )
        origin = re.search(r'op_name="([^"]*)"', call["rest"])
        config = re.search(r"backend_config=(.*)$", call["rest"])
        found.append(
            HloAllReduce(
                call["name"].lstrip("%"),
                operands,
                tuple(dtype for dtype, _ in arrays),
                sum(sizes),
                origin[1] if origin else "",
                config[1] if config else "",
            )
        )
    return found
