"""A parser of optimized HLO text, limited to the needs of the dataflow analysis.

    module = HloModule(compiled.as_text())
    module.computations[module.entry]   # name -> HloInstruction, operands before users
    module.aliases                      # output -> the parameter that it is written over

The parser supports XLA's CPU and GPU backends, with command buffers, asynchronous pairs and
fusions.
"""

import dataclasses
import functools
import math
import re

Path = tuple[int, ...]  # path into a value that may be a tuple; () is the value itself


_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s.*->.*\{\s*$")
_LINE = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,<=]*)\]")
_CALLED = re.compile(r"\b(calls|to_apply|body|\w+_computations?)=(\{[^}]*\}|%[\w.\-]+)")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')

# Instructions that move their first operand's data (concatenate: every operand's) elsewhere.
MOVES = frozenset(
    "copy slice dynamic-slice transpose convert reverse reshape pad concatenate".split()
)
# Instructions whose result is their first operand's data in the same place.
FREE = frozenset("bitcast bitcast-convert optimization-barrier domain add-dependency".split())
# Instructions that overwrite part of their first operand.
UPDATES = frozenset({"dynamic-update-slice", "scatter"})


@dataclasses.dataclass(frozen=True)
class HloInstruction:
    """One line: `name = type opcode(arguments), attributes`."""

    name: str
    type: str
    opcode: str
    arguments: str  # between the parentheses
    attributes: str  # after them

    @functools.cached_property
    def operands(self) -> list[str]:
        return _NAME.findall(self.arguments)

    @functools.cached_property
    def nbytes(self) -> int:
        bits = 0
        for kind, width, dims in _ARRAY.findall(self.type):
            size = math.prod(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)
            bits += size * (8 if kind == "pred" else int(width))
        return bits // 8

    @property
    def op_name(self) -> str:
        found = _OP_NAME.search(self.attributes)
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""

    @property
    def called(self) -> list[str]:
        return _NAME.findall(" ".join(names for _, names in _CALLED.findall(self.attributes)))

    @property
    def body(self) -> str:
        """The name of a while loop's body computation."""
        found = re.search(r"\bbody=%([\w.\-]+)", self.attributes)
        assert found is not None, self
        return found[1]

    @property
    def aliases(self) -> list[tuple[Path, int, Path]]:
        """The in-place updates of a custom call such as a Pallas kernel, as triples.

        They are (path of the output, index of the operand, path in the operand).
        """
        found = _ALIAS.findall(_value(self.attributes, "output_to_operand_aliasing="))
        return [(_path(out), int(operand), _path(place)) for out, operand, place in found]

    @property
    def array(self) -> str:
        """The first array in the type, such as "bf16[8,128]"; "" if there is none."""
        found = _ARRAY.search(self.type)
        return found[0] if found else ""

    @property
    def index(self) -> int:
        found = re.search(r"\bindex=(\d+)", self.attributes)
        return int(found[1]) if found else 0

    @property
    def data(self) -> list[str]:
        """The operands that hold data, without indices and padding."""
        return self.operands if self.opcode == "concatenate" else self.operands[:1]


class HloModule:
    """Computations by name, each with its instructions by name, operands before users.

    `entry` is the name of the entry computation, "" if the text has none.
    """

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, HloInstruction]] = {}
        self.roots: dict[str, HloInstruction] = {}
        self.entry = name = ""
        for line in text.splitlines():
            if head := _COMPUTATION.match(line):
                name = head[2]
                self.computations[name] = {}
                self.entry = name if head[1] else self.entry
            elif name and (found := _LINE.match(line)):
                instruction = _instruction(found[2], line[found.end() :])
                self.computations[name][found[2]] = instruction
                if found[1]:
                    self.roots[name] = instruction
        header = text.partition("\n")[0]
        # The path is () if there is one output.
        self.aliases: dict[Path, int] = {
            _path(out): int(parameter)
            for out, parameter, _ in _ALIAS.findall(_value(header, "input_output_alias="))
        }

    @property
    def parameters(self) -> list[HloInstruction]:
        entry = self.computations[self.entry].values()
        found = [instruction for instruction in entry if instruction.opcode == "parameter"]
        return sorted(found, key=lambda parameter: int(parameter.arguments))


def _instruction(name: str, rest: str) -> HloInstruction:
    kind = _balanced(rest) if rest.startswith("(") else rest.partition(" ")[0]
    opcode, _, _ = rest[len(kind) :].lstrip().partition("(")
    rest = rest[len(kind) :].lstrip()[len(opcode) :]
    arguments = _balanced(rest)
    return HloInstruction(name, kind, opcode, arguments[1:-1], rest[len(arguments) :])


def _balanced(text: str) -> str:
    """Returns `text` from its first bracket to the one that closes it."""
    depth = 0
    for end, character in enumerate(text):
        depth += (character in "({") - (character in ")}")
        if depth == 0:
            return text[: end + 1]
    return text


def _value(text: str, attribute: str) -> str:
    _, found, rest = text.partition(attribute)
    return _balanced(rest) if found else ""


def _path(text: str) -> Path:
    return tuple(int(index) for index in text.replace(",", " ").split())
