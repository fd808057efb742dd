"""Dataflow analysis of an HLO module: the origins of its values, and the instructions that copy.

The origins of a value are the entry parameters of which the value is a version. Versions are the
parameter itself, values moved out of it or written into it, and values of its type computed from
it. The analysis follows them through tuples, loops, branches, calls, fusions and kernels that alias
an operand.
"""

import dataclasses
from collections.abc import Collection, Iterator

from jaxattn.aliasing.hlo import FREE, MOVES, UPDATES, HloInstruction, HloModule, Path

# Path into a value that may be a tuple -> entry parameters of which the array there is a version.
Origins = dict[Path, frozenset[int]]


def _merge(*values: Origins) -> Origins:
    merged: Origins = {}
    for value in values:
        for path, origins in value.items():
            merged[path] = merged.get(path, frozenset()) | origins
    return merged


def _at(value: Origins, *path: int) -> Origins:
    return {p[len(path) :]: origins for p, origins in value.items() if p[: len(path)] == path}


def _under(value: Origins, *path: int) -> Origins:
    return {path + p: origins for p, origins in value.items()}


class CopyAnalysis:
    """Evaluates computations on origins and records the copies that it finds."""

    def __init__(self, module: HloModule, sizes: dict[int, int]):
        self.module = module
        self.sizes = sizes
        # (parameter, instruction) -> bytes, whether it is a plain copy, loop, op_name
        self.found: dict[tuple[int, str], tuple[int, bool, str | None, str]] = {}

    def note(
        self, i: HloInstruction, origins: Collection[int], nbytes: int, loop: str | None
    ) -> None:
        for origin in origins:
            noted = self.found.get((origin, i.name), (0,))[0]
            if nbytes > noted and origin in self.sizes:
                plain = i.opcode.startswith("copy")
                self.found[origin, i.name] = (nbytes, plain, loop, i.op_name)

    def note_store(
        self, computation: str, out: Path, origins: Collection[int], loop: str | None
    ) -> None:
        """Records a copy that is stored over the origins, as output `out` of a computation."""
        within = self.module.computations[computation]
        i = self.module.roots[computation]
        path = list(out)
        while i.opcode in FREE or i.opcode in ("tuple", "get-tuple-element", "call", "copy-done"):
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
        self, computation: str, args: list[Origins], loop: str | None = None, quiet: bool = False
    ) -> Origins:
        """Returns the origins of a computation's result."""
        within = self.module.computations[computation]
        values: dict[str, Origins] = {}
        for name, i in within.items():
            inputs = [values.get(operand, {}) for operand in i.operands]
            values[name] = self.step(within, i, inputs, args, loop, quiet)
        return values[self.module.roots[computation].name]

    def step(
        self,
        within: dict[str, HloInstruction],
        i: HloInstruction,
        inputs: list[Origins],
        args: list[Origins],
        loop: str | None,
        quiet: bool,
    ) -> Origins:
        if i.opcode.endswith("-start"):  # its result is a tuple; a copy's is (result, operand)
            whole = dataclasses.replace(i, opcode=i.opcode.removesuffix("-start"))
            value = self.step(within, whole, inputs, args, loop, quiet)
            return _under(value, 0 if whole.opcode == "copy" else 1)
        if i.opcode.endswith("-done"):
            return _at(inputs[0], 0 if i.opcode == "copy-done" else 1)
        if i.opcode in FREE or i.opcode == "async-update":
            return inputs[0]
        if i.opcode in UPDATES and not i.type.startswith("("):
            return inputs[0]
        if i.opcode in MOVES:
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
        if i.opcode == "custom-call":
            return _merge(*(_under(_at(inputs[n], *place), *out) for out, n, place in i.aliases))
        return self.computed(within, i, inputs)

    def loop(self, i: HloInstruction, initial: Origins, quiet: bool) -> Origins:
        carry: Origins = {}
        while (grown := _merge(initial, carry)) != carry:
            carry = grown
            initial = _merge(initial, self.run(i.body, [carry], i.name, quiet=True))
        if not quiet:
            self.run(i.body, [carry], i.name)
            for path, origins in carry.items():
                self.note_store(i.body, path, origins, i.name)
        return carry

    def computed(
        self, within: dict[str, HloInstruction], i: HloInstruction, inputs: list[Origins]
    ) -> Origins:
        """Returns a leaf as origin of values that are computed from it and have its type."""
        origins: set[int] = set()
        for operand, value in zip(i.operands, inputs, strict=True):
            if i.array and operand in within and within[operand].type.startswith(i.array):
                origins |= {o for o in value.get((), ()) if self.sizes.get(o) == i.nbytes}
        return {(): frozenset(origins)} if origins else {}

    def moved(
        self, computation: str, inputs: list[Origins]
    ) -> Iterator[tuple[frozenset[int], int]]:
        """Yields the origins and bytes that a fusion writes without computing them.

        A fusion that ends in an update writes only the update, in place, if nothing but bitcasts
        and other updates lies between the update and the parameter that it updates.
        """
        within, root = self.module.computations[computation], self.module.roots[computation]

        def walk(i: HloInstruction, nbytes: int) -> Iterator[tuple[frozenset[int], int]]:
            nbytes = min(nbytes, i.nbytes)
            if i.opcode == "parameter":
                yield inputs[int(i.arguments)].get((), frozenset()), nbytes
            elif i.opcode in MOVES | FREE | UPDATES:
                for operand in i.data:
                    yield from walk(within[operand], nbytes)

        for out in [within[o] for o in root.operands] if root.opcode == "tuple" else [root]:
            updates = False
            while out.opcode in UPDATES or out.opcode == "bitcast":
                if out.opcode == "dynamic-update-slice":
                    yield from walk(within[out.operands[1]], out.nbytes)
                updates |= out.opcode in UPDATES
                out = within[out.operands[0]]
            if not (updates and out.opcode == "parameter"):
                yield from walk(out, out.nbytes)
