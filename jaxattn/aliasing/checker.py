"""Proof that a compiled step keeps its donated buffers in place, read from what XLA compiled.

    compiled = jax.jit(step, donate_argnames="state").lower(params, state, batch).compile()
    print(check_aliasing(compiled))

Donation is a request that JAX and XLA may decline without an error. The optimised HLO tells what
became of it: `input_output_alias` in its header, and every copy that had to be added. Arguments are
followed through tuples, loops, branches, calls and fusions to those copies, to give them names.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator
from typing import Any

import jax

from jaxattn.aliasing.dataflow import CopyAnalysis
from jaxattn.aliasing.hlo import HloModule

_ADVICE = "carry it whole, and after a write read only what was written"


class AliasingError(ValueError):
    """A compiled step does not update its donated buffers in place. The message has one line per
    finding.
    """


@dataclasses.dataclass(frozen=True)
class BufferCopy:
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
    copies: tuple[BufferCopy, ...]

    @property
    def largest_copy_in_loop(self) -> BufferCopy | None:
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
    """Checks that a step updates its donated buffers in place, and that depth costs no scratch.

    The check fails if a donated leaf is not aliased to an output. The check also fails if at least
    `fraction` of a donated leaf is copied, in a loop or once per step. A slice, a transpose, a cast
    or a fusion that only moves data counts as a copy. With `shallower`, the check fails if temp or
    unaliased outputs grow with the number of layers.

    The following are not copies: a gather, a slice that XLA fused into the op that reads it, and a
    `copy` instruction without a second buffer (temp is smaller than the copy, so XLA made the copy
    a no-op). A result that is as large as the leaf and exists next to the leaf's new value is temp,
    not a copy: pass `shallower` to find such a result.

    Args:
        compiled: `jax.jit(step, donate_argnames=...).lower(...).compile()`, on any backend.
        fraction: the smallest copied fraction of a leaf's bytes that fails the check.
        slack: bytes; smaller copies and smaller growth with depth pass.
        exclude: parts of leaf names. The check skips donated leaves whose name contains one of
            them.
        shallower: the same step, compiled for fewer layers.
        layers: the numbers of layers of `compiled` and `shallower`; required with `layer_bytes`.
        layer_bytes: bytes of temp or unaliased outputs that each layer's own inputs explain.

    Raises:
        TypeError: `compiled` or `shallower` is not a compiled step.
        AliasingError: the check found a copy; the message has one line per finding, with the leaf.
        ValueError: no donated leaf's name contains `exclude`, or one of `shallower`, `layers` and
            `layer_bytes` is given without another that it needs.
    """
    for name, each in (("compiled", compiled), ("shallower", shallower)):
        if not hasattr(each, "as_text") and (each is not None or name == "compiled"):
            raise TypeError(
                f"check_aliasing: {name} must be jax.jit(step, donate_argnames=...).lower(...)"
                f".compile(), got {type(each).__name__}"
            )
    if (shallower is None and layers) or (layer_bytes and not layers):
        raise ValueError(
            "shallower=, layers=(of compiled, of shallower) and layer_bytes= go together"
        )
    module = HloModule(compiled.as_text() or "")
    if not module.entry:
        raise AliasingError("this backend gives no HLO text for a compiled step")
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
class _ArgumentLeaf:
    name: str
    donated: bool
    parameter: int | None  # of the entry computation; None when JAX dropped it as unused
    nbytes: int


def _leaves(compiled: jax.stages.Compiled, module: HloModule) -> list[_ArgumentLeaf]:
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
        leaves.append(_ArgumentLeaf(name, info.donated, number, nbytes))
    return leaves


def _copies(module: HloModule, leaves: list[_ArgumentLeaf], memory: Any) -> list[BufferCopy]:
    """Every copy of an argument, largest first."""
    sizes = {leaf.parameter: leaf.nbytes for leaf in leaves if leaf.parameter is not None}
    tracer = CopyAnalysis(module, sizes)
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
                copies.append(BufferCopy(leaf.name, copied, leaf.nbytes, loop, name, op_name))
    return sorted(copies, key=lambda copy: -copy.nbytes)
