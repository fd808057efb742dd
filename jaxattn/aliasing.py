"""Proof that a compiled step keeps its donated buffers in place, read from what XLA compiled.

    compiled = jax.jit(step, donate_argnames="state").lower(params, state, batch).compile()
    print(check_aliasing(compiled))

Donation is a request that JAX and XLA may decline without an error. The optimised HLO tells what
became of it: `input_output_alias` in its header, and every copy that had to be added. Arguments are
followed through tuples, loops, branches, calls and fusions to those copies, to give them names.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Iterator
from typing import Any

import jax

_ADVICE = "carry it whole, and after a write read only what was written"


class AliasingError(ValueError):
    """A compiled step does not update its donated buffers in place. One line for each finding."""


@dataclasses.dataclass(frozen=True)
class Copy:
    """An instruction that copies an argument, or part of one.

    Attributes:
        leaf: the argument's name, such as `state.arena['bfloat16']`.
        nbytes: bytes that one execution copies out of it or into it, of `leaf_nbytes`.
        loop: the innermost while loop around the instruction; None when it runs once a step.
        instruction: its name in the HLO text.
        op_name: what it came from, in JAX's words; often empty for a copy that XLA added.
    """

    leaf: str
    nbytes: int
    leaf_nbytes: int
    loop: str | None
    instruction: str
    op_name: str

    def __str__(self) -> str:
        often = f"each time round {self.loop}" if self.loop else "once a step"
        origin = f", {self.op_name}" if self.op_name else ""
        return (
            f"{self.leaf}: {self.nbytes:,} of its {self.leaf_nbytes:,} bytes are copied {often} "
            f"({self.instruction}{origin})"
        )


@dataclasses.dataclass(frozen=True)
class AliasingReport:
    """What a step that passed does. Bytes are those of one device.

    Attributes:
        donated_bytes: of the donated arguments.
        aliased_bytes: of those that XLA aliased to an output.
        temp_bytes: XLA's own scratch; None where the backend does not tell.
        copies: every copy of more than `slack` bytes of any argument, weights too, largest first.
    """

    donated_bytes: int
    aliased_bytes: int
    temp_bytes: int | None
    copies: tuple[Copy, ...]

    @property
    def largest_copy_in_loop(self) -> Copy | None:
        return next((copy for copy in self.copies if copy.loop), None)

    def __str__(self) -> str:
        temp = "unknown" if self.temp_bytes is None else f"{self.temp_bytes:,}"
        return (
            f"donated {self.donated_bytes:,} bytes, aliased {self.aliased_bytes:,}, temp {temp}; "
            f"largest copy in a loop: {self.largest_copy_in_loop or 'none'}"
        )


def check_aliasing(
    compiled: jax.stages.Compiled,
    *,
    fraction: float = 1 / 8,
    slack: int = 64 * 1024,
    exclude: Collection[str] = (),
    shallower: jax.stages.Compiled | None = None,
    layers: tuple[int, int] | None = None,
    layer_bytes: int = 0,
) -> AliasingReport:
    """Checks that a step updates its donated buffers in place and that depth costs no scratch.

    Fails when a donated leaf is not aliased to an output; when `fraction` of a donated leaf or more
    is copied, in a loop or once a step, also by a slice, a transpose, a cast or a fusion that does
    nothing else; and, given `shallower`, when temp or unaliased outputs grow with the layers. Not a
    copy: a gather, a slice that XLA fused into the op reading it, and a `copy` instruction that has
    no second buffer to go to (temp is smaller than it, so XLA made it a no-op).

    Args:
        compiled: `jax.jit(step, donate_argnames=...).lower(...).compile()`, on any backend.
        fraction: of a leaf's bytes.
        slack: bytes; copies and growth with depth up to this pass.
        exclude: parts of leaf names; donated leaves with one of them in their name are not checked.
        shallower: the same step, compiled for fewer layers.
        layers: how many layers `compiled` and `shallower` have; needed with `layer_bytes`.
        layer_bytes: temp or unaliased output bytes that each layer's own inputs explain.

    Raises:
        AliasingError: a line for each finding, with the leaf's name.
        ValueError: `exclude` is in no donated leaf's name, or one of `shallower`, `layers` and
            `layer_bytes` lacks another that it needs.
    """
    if (shallower is None and layers) or (layer_bytes and not layers):
        raise ValueError(
            "shallower=, layers=(of compiled, of shallower) and layer_bytes= go together"
        )
    module = _Module(compiled.as_text() or "")
    leaves = _leaves(compiled, module)
    donated = [leaf for leaf in leaves if leaf.donated]
    if not donated:
        raise AliasingError("no argument is donated: jax.jit(step, donate_argnames='state')")
    if unknown := [part for part in exclude if not any(part in leaf.name for leaf in donated)]:
        raise ValueError(f"exclude={unknown}: no such donated leaf in {[x.name for x in donated]}")
    memory = compiled.memory_analysis()
    copies = [copy for copy in _copies(module, leaves, memory) if copy.nbytes > slack]

    findings = []
    for leaf in donated:
        if any(part in leaf.name for part in exclude):
            continue
        if leaf.parameter is None:
            findings.append(
                f"{leaf.name}: donated but unused, so JAX dropped it from the step: use and return "
                "it, or do not donate it"
            )
        elif leaf.nbytes and leaf.parameter not in module.aliases.values():
            findings.append(
                f"{leaf.name}: donated, but its {leaf.nbytes:,} bytes are aliased to no output: "
                "return its new value, with the same shape and dtype"
            )
        large = [c for c in copies if c.leaf == leaf.name and c.nbytes >= fraction * leaf.nbytes]
        # The loop's copies first: they cost the most, and explain those around the loop.
        for worst in sorted(large, key=lambda copy: copy.loop is None)[:1]:
            others = f", and in {len(large) - 1} more places" if len(large) > 1 else ""
            findings.append(f"{worst}{others}: {_ADVICE}")
    if shallower is not None:
        findings += _growth(memory, shallower.memory_analysis(), layers, layer_bytes, slack)
    if findings:
        raise AliasingError("\n".join(findings))
    return AliasingReport(
        donated_bytes=sum(leaf.nbytes for leaf in donated),
        aliased_bytes=sum(x.nbytes for x in donated if x.parameter in module.aliases.values()),
        temp_bytes=None if memory is None else memory.temp_size_in_bytes,
        copies=tuple(copies),
    )


def _growth(
    deep: Any, shallow: Any, layers: tuple[int, int] | None, layer_bytes: int, slack: int
) -> Iterator[str]:
    if deep is None or shallow is None:
        yield "growth with depth: this backend has no memory_analysis"
        return
    more, less = layers or (0, 0)
    explained = slack + layer_bytes * (more - less)
    depth = f" from {less} to {more} layers" if layers else " with depth"
    for what, grown in {
        "temp": deep.temp_size_in_bytes - shallow.temp_size_in_bytes,
        "outputs that are not aliased": _unaliased(deep) - _unaliased(shallow),
    }.items():
        if grown > explained:
            yield f"{what}: grow by {grown:,} bytes{depth}, of which {explained:,} are explained"


def _unaliased(memory: Any) -> int:
    return memory.output_size_in_bytes - memory.alias_size_in_bytes


@dataclasses.dataclass(frozen=True)
class _Leaf:
    name: str
    donated: bool
    parameter: int | None  # of the entry computation; None when JAX dropped it as unused
    nbytes: int


def _leaves(compiled: jax.stages.Compiled, module: "_Module") -> list[_Leaf]:
    flat = jax.tree_util.tree_flatten_with_path(compiled.args_info)[0]
    # JAX drops unused arguments; in its public API, what tells is that they have no sharding.
    tree: Any = compiled.in_tree
    kept = [sharding is not None for sharding in tree.flatten_up_to(compiled.input_shardings)]
    parameters = module.parameters
    first = len(parameters) - sum(kept)  # hoisted constants come before the arguments
    if first < 0:
        raise AliasingError(f"{sum(kept)} arguments do not match {len(parameters)} HLO parameters")
    numbers = [first + sum(kept[:i]) if keep else None for i, keep in enumerate(kept)]
    # Python names of arguments are in the HLO alone, as "state.arena['bfloat16']".
    prefixes = {}
    for (path, _), number in zip(flat, numbers, strict=True):
        suffix = jax.tree_util.keystr(path[2:])
        if number is not None and parameters[number].op_name.endswith(suffix):
            prefixes[path[:2]] = parameters[number].op_name.removesuffix(suffix)
    leaves = []
    for (path, info), number in zip(flat, numbers, strict=True):
        # The path starts with 0, n for the nth positional argument and 1, name for a keyword.
        unnamed = f"args[{path[1].idx}]" if path[0].idx == 0 else str(path[1].key)
        name = prefixes.get(path[:2], unnamed) + jax.tree_util.keystr(path[2:])
        whole = math.prod(info.shape) * info.dtype.itemsize
        nbytes = whole if number is None else parameters[number].nbytes  # of one device
        leaves.append(_Leaf(name, info.donated, number, nbytes))
    return leaves


# The HLO text -------------------------------------------------------------------------------------

_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s.*->.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,<=]*)\]")
_CALLED = re.compile(r"\b(calls|to_apply|body|\w+_computations?)=(\{[^}]*\}|%[\w.\-]+)")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')

# Instructions whose result is their first operand's data, elsewhere (concatenate: every operand's).
_MOVES = frozenset(
    "copy slice dynamic-slice transpose convert reverse reshape pad concatenate".split()
)
# The same in the same place.
_FREE = frozenset("bitcast bitcast-convert optimization-barrier domain add-dependency".split())
# Instructions that overwrite part of their first operand.
_UPDATES = frozenset({"dynamic-update-slice", "scatter"})


@dataclasses.dataclass(frozen=True)
class _Instruction:
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
    def index(self) -> int:
        found = re.search(r"\bindex=(\d+)", self.attributes)
        return int(found[1]) if found else 0

    @property
    def data(self) -> list[str]:
        """The operands that hold data: not indices, not padding."""
        return self.operands if self.opcode == "concatenate" else self.operands[:1]


class _Module:
    """Computations by name; their instructions by name, operands before users."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, _Instruction]] = {}
        self.roots: dict[str, _Instruction] = {}
        self.entry = name = ""
        for line in text.splitlines():
            if head := _COMPUTATION.match(line):
                name = head[2]
                self.computations[name] = {}
                self.entry = name if head[1] else self.entry
            elif name and (found := _INSTRUCTION.match(line)):
                instruction = _instruction(found[2], line[found.end() :])
                self.computations[name][found[2]] = instruction
                if found[1]:
                    self.roots[name] = instruction
        if not self.entry:
            raise AliasingError("this backend gives no HLO text for a compiled step")
        header = text.partition("\n")[0]
        # Output index (() when there is one output) -> the parameter that it is written over.
        self.aliases = {
            _path(out): int(parameter)
            for out, parameter, _ in _ALIAS.findall(_value(header, "input_output_alias="))
        }

    @property
    def parameters(self) -> list[_Instruction]:
        entry = self.computations[self.entry].values()
        found = [instruction for instruction in entry if instruction.opcode == "parameter"]
        return sorted(found, key=lambda parameter: int(parameter.arguments))


def _instruction(name: str, rest: str) -> _Instruction:
    kind = _balanced(rest) if rest.startswith("(") else rest.partition(" ")[0]
    opcode, _, _ = rest[len(kind) :].lstrip().partition("(")
    rest = rest[len(kind) :].lstrip()[len(opcode) :]
    arguments = _balanced(rest)
    return _Instruction(name, kind, opcode, arguments[1:-1], rest[len(arguments) :])


def _balanced(text: str) -> str:
    """From the bracket that `text` starts with to the one that closes it."""
    depth = 0
    for end, character in enumerate(text):
        depth += (character in "({") - (character in ")}")
        if depth == 0:
            return text[: end + 1]
    return text


def _value(text: str, attribute: str) -> str:
    _, found, rest = text.partition(attribute)
    return _balanced(rest) if found else ""


def _path(text: str) -> tuple[int, ...]:
    return tuple(int(index) for index in text.replace(",", " ").split())


# Where values come from ---------------------------------------------------------------------------

# Path into a value that may be a tuple -> entry parameters that the array there is a version of.
_Origins = dict[tuple[int, ...], frozenset[int]]


def _merge(*values: _Origins) -> _Origins:
    merged: _Origins = {}
    for value in values:
        for path, origins in value.items():
            merged[path] = merged.get(path, frozenset()) | origins
    return merged


def _at(value: _Origins, *path: int) -> _Origins:
    return {p[len(path) :]: origins for p, origins in value.items() if p[: len(path)] == path}


def _under(value: _Origins, *path: int) -> _Origins:
    return {path + p: origins for p, origins in value.items()}


def _copies(module: _Module, leaves: list[_Leaf], memory: Any) -> list[Copy]:
    """Every copy of an argument, largest first."""
    sizes = {leaf.parameter: leaf.nbytes for leaf in leaves if leaf.parameter is not None}
    tracer = _Tracer(module, sizes)
    outputs = tracer.run(
        module.entry, [{(): frozenset({n})} for n in range(len(module.parameters))]
    )
    for out, parameter in module.aliases.items():
        tracer.note_store(module.entry, out, frozenset({parameter}), None)
    # A plain copy larger than what XLA has besides the arguments can only go to an argument's own
    # buffer: to that of another argument if it returns one as the other, else nowhere.
    room = math.inf if memory is None else memory.temp_size_in_bytes + _unaliased(memory)
    crossing = {
        origin
        for out, parameter in module.aliases.items()
        for origin in outputs.get(out, frozenset()) - {parameter}
    }
    copies = []
    for leaf in leaves:
        for (parameter, name), (nbytes, plain, loop, op_name) in tracer.found.items():
            no_op = plain and nbytes > room and parameter not in crossing
            if parameter == leaf.parameter and not no_op:
                copied = min(nbytes, leaf.nbytes)
                copies.append(Copy(leaf.name, copied, leaf.nbytes, loop, name, op_name))
    return sorted(copies, key=lambda copy: -copy.nbytes)


class _Tracer:
    """Evaluates computations on origins and notes the copies that it meets."""

    def __init__(self, module: _Module, sizes: dict[int, int]):
        self.module = module
        self.sizes = sizes
        # (parameter, instruction) -> bytes, whether it is a plain copy, loop, op_name
        self.found: dict[tuple[int, str], tuple[int, bool, str | None, str]] = {}

    def note(
        self, i: _Instruction, origins: Collection[int], nbytes: int, loop: str | None
    ) -> None:
        for origin in origins:
            noted = self.found.get((origin, i.name), (0,))[0]
            if nbytes > noted and origin in self.sizes:
                plain = i.opcode.startswith("copy")
                self.found[origin, i.name] = (nbytes, plain, loop, i.op_name)

    def note_store(
        self, computation: str, out: tuple[int, ...], origins: Collection[int], loop: str | None
    ) -> None:
        """Notes a copy whose result is stored over the origins: output `out` of a computation."""
        within = self.module.computations[computation]
        i = self.module.roots[computation]
        path = list(out)
        while i.opcode in _FREE or i.opcode in ("tuple", "get-tuple-element", "call", "copy-done"):
            if i.opcode == "tuple":
                i = within[i.operands[path.pop(0)]]
            elif i.opcode == "call":
                within, i = self.module.computations[i.called[0]], self.module.roots[i.called[0]]
            else:
                path = [i.index, *path] if i.opcode == "get-tuple-element" else path
                i = within[i.operands[0]]
        if i.opcode in ("copy", "copy-start"):
            self.note(i, origins, within[i.operands[0]].nbytes, loop)

    def run(
        self, computation: str, args: list[_Origins], loop: str | None = None, quiet: bool = False
    ) -> _Origins:
        """The origins of what a computation returns."""
        within = self.module.computations[computation]
        values: dict[str, _Origins] = {}
        for name, i in within.items():
            inputs = [values.get(operand, {}) for operand in i.operands]
            values[name] = self.step(within, i, inputs, args, loop, quiet)
        return values[self.module.roots[computation].name]

    def step(
        self,
        within: dict[str, _Instruction],
        i: _Instruction,
        inputs: list[_Origins],
        args: list[_Origins],
        loop: str | None,
        quiet: bool,
    ) -> _Origins:
        if i.opcode.endswith("-start"):  # its result is a tuple: of a copy the result, the operand
            whole = dataclasses.replace(i, opcode=i.opcode.removesuffix("-start"))
            value = self.step(within, whole, inputs, args, loop, quiet)
            return _under(value, 0 if whole.opcode == "copy" else 1)
        if i.opcode.endswith("-done"):
            return _at(inputs[0], 0 if i.opcode == "copy-done" else 1)
        if i.opcode in _FREE or i.opcode == "async-update":
            return inputs[0]
        if i.opcode in _UPDATES and not i.type.startswith("("):
            return inputs[0]
        if i.opcode in _MOVES:
            for operand, value in zip(i.data, inputs, strict=False):
                nbytes = min(within[operand].nbytes, i.nbytes)
                self.note(i, () if quiet else value.get((), ()), nbytes, loop)
            return _merge(*inputs[: len(i.data)])
        if i.opcode in ("call", "fusion", "async") and i.called:
            fusion = i.opcode == "fusion"
            for origins, nbytes in self.moved(i.called[0], inputs) if fusion and not quiet else ():
                self.note(i, origins, nbytes, loop)
            return self.run(i.called[0], inputs, loop, quiet or fusion)
        if i.opcode == "parameter":
            return args[int(i.arguments)]
        if i.opcode == "tuple":
            return _merge(*(_under(value, n) for n, value in enumerate(inputs)))
        if i.opcode == "get-tuple-element":
            return _at(inputs[0], i.index)
        if i.opcode == "while":
            return self.loop(i, inputs[0], quiet)
        if i.opcode == "conditional":
            branches = zip(i.called, inputs[1:], strict=True)
            return _merge(*(self.run(name, [value], loop, quiet) for name, value in branches))
        if i.opcode == "custom-call":  # how a Pallas kernel updates in place
            aliases = _ALIAS.findall(_value(i.attributes, "output_to_operand_aliasing="))
            return _merge(
                *(_under(_at(inputs[int(n)], *_path(p)), *_path(out)) for out, n, p in aliases)
            )
        return self.computed(within, i, inputs)

    def loop(self, i: _Instruction, initial: _Origins, quiet: bool) -> _Origins:
        body = re.search(r"\bbody=%([\w.\-]+)", i.attributes)
        assert body is not None, i
        carry: _Origins = {}
        while (grown := _merge(initial, carry)) != carry:
            carry = grown
            initial = _merge(initial, self.run(body[1], [carry], i.name, quiet=True))
        if not quiet:
            self.run(body[1], [carry], i.name)
            for path, origins in carry.items():
                self.note_store(body[1], path, origins, i.name)
        return carry

    def computed(
        self, within: dict[str, _Instruction], i: _Instruction, inputs: list[_Origins]
    ) -> _Origins:
        """What is computed from a leaf and has its type is its next version."""
        kind = _ARRAY.search(i.type)
        origins: set[int] = set()
        for operand, value in zip(i.operands, inputs, strict=True):
            if kind and operand in within and within[operand].type.startswith(kind[0]):
                origins |= {o for o in value.get((), ()) if self.sizes.get(o) == i.nbytes}
        return {(): frozenset(origins)} if origins else {}

    def moved(
        self, computation: str, inputs: list[_Origins]
    ) -> Iterator[tuple[frozenset[int], int]]:
        """Origins, and bytes, of what a fusion writes that it moved and did not compute.

        A fusion that ends in an update writes the update alone, in place, when nothing but bitcasts
        and other updates lies between that and the parameter it updates.
        """
        within, root = self.module.computations[computation], self.module.roots[computation]

        def walk(i: _Instruction, nbytes: int) -> Iterator[tuple[frozenset[int], int]]:
            nbytes = min(nbytes, i.nbytes)
            if i.opcode == "parameter":
                yield inputs[int(i.arguments)].get((), frozenset()), nbytes
            elif i.opcode in _MOVES | _FREE | _UPDATES:
                for operand in i.data:
                    yield from walk(within[operand], nbytes)

        for out in [within[o] for o in root.operands] if root.opcode == "tuple" else [root]:
            updates = False
            while out.opcode in _UPDATES or out.opcode == "bitcast":
                if out.opcode == "dynamic-update-slice":
                    yield from walk(within[out.operands[1]], out.nbytes)
                updates |= out.opcode in _UPDATES
                out = within[out.operands[0]]
            if not (updates and out.opcode == "parameter"):
                yield from walk(out, out.nbytes)
