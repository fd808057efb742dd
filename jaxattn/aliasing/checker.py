"""Proof that a compiled step keeps its donated buffers in place, from the optimized HLO.

    compiled = jax.jit(step, donate_argnames="state").lower(params, state, batch).compile()
    print(check_aliasing(compiled))

Donation is a request that JAX and XLA may decline without an error. The optimized HLO shows the
result: `input_output_alias` in its header, and every copy that XLA had to add. The check follows
arguments through tuples, loops, branches, calls and fusions to these copies, and reports their
names.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator
from typing import Any

import jax

from jaxattn.aliasing.dataflow import CopyAnalysis
from jaxattn.aliasing.hlo import HloModule

_ADVICE = "carry the whole array, and after a write read only the part that was written"


class AliasingError(ValueError):
    """A compiled step does not update its donated buffers in place. Each finding has a line."""


@dataclasses.dataclass(frozen=True)
class BufferCopy:
    """An instruction that copies an argument, or part of one.

    Attributes:
        leaf: The argument's name, such as `state.arena['bfloat16']`.
        nbytes: The bytes that one execution copies out of the argument or into it.
        leaf_nbytes: The bytes of the whole argument.
        loop: The innermost while loop around the instruction; None if it runs once per step.
        instruction: The instruction's name in the HLO text.
        op_name: JAX's name of its origin; often empty for a copy that XLA added.
    """

    leaf: str
    nbytes: int
    leaf_nbytes: int
    loop: str | None
    instruction: str
    op_name: str

    def __str__(self) -> str:
        often = f"in each iteration of {self.loop}" if self.loop else "once per step"
        origin = f", {self.op_name}" if self.op_name else ""
        return (
            f"{self.leaf}: {self.nbytes:,} of its {self.leaf_nbytes:,} bytes are copied {often} "
            f"({self.instruction}{origin})"
        )


@dataclasses.dataclass(frozen=True)
class AliasingReport:
    """The result of a step that passed the check. Bytes are per device.

    Attributes:
        donated_bytes: The bytes of the donated arguments.
        aliased_bytes: The bytes of those that XLA aliased to an output.
        temp_bytes: The bytes of XLA's temp; None if the backend does not report them.
        copies: Every copy of more than `slack` bytes of any argument, including weights, largest
            first.
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

    The check fails if a donated leaf is not aliased to an output. It fails if at least `fraction`
    of a donated leaf is copied, in a loop or once per step. A slice, a transpose, a cast, or a
    fusion that does nothing else counts as a copy. With `shallower`, it also fails if temp or
    unaliased outputs grow with the number of layers.

    A gather is not a copy, nor is a slice that XLA fused into the op that reads it. A `copy`
    instruction larger than temp does not count: it has no second buffer, so XLA made it a no-op. If
    a step computes a leaf's new value and another result of the same size, that result is temp.
    Pass `shallower` to find such a result.

    Args:
        compiled: `jax.jit(step, donate_argnames=...).lower(...).compile()`, on any backend.
        fraction: The fraction of a leaf's bytes that must not be copied.
        slack: The bytes up to which copies and growth with depth pass.
        exclude: Parts of leaf names. Donated leaves whose name contains one are not checked.
        shallower: The same step, compiled for fewer layers.
        layers: The numbers of layers of `compiled` and `shallower`; needed with `layer_bytes`.
        layer_bytes: The bytes that each layer may add to temp or to unaliased outputs, because of
            its own inputs.

    Raises:
        TypeError: `compiled` or `shallower` is not a compiled step.
        AliasingError: The step fails the check. Each finding has a line with the leaf's name.
        ValueError: A string of `exclude` is in no donated leaf's name, or one of `shallower`,
            `layers` and `layer_bytes` lacks another that it needs.
    """
    for name, each in (("compiled", compiled), ("shallower", shallower)):
        if not hasattr(each, "as_text") and (each is not None or name == "compiled"):
            raise TypeError(
                f"check_aliasing: {name} must be jax.jit(step, donate_argnames=...).lower(...)"
                f".compile(), got {type(each).__name__}"
            )
    if (shallower is None and layers) or (layer_bytes and not layers):
        raise ValueError(
            "layers=(of compiled, of shallower) needs shallower=, and layer_bytes= needs layers="
        )
    module = HloModule(compiled.as_text() or "")
    if not module.entry:
        raise AliasingError("this backend gives no HLO text for a compiled step")
    leaves = _leaves(compiled, module)
    donated = [leaf for leaf in leaves if leaf.donated]
    if not donated:
        raise AliasingError("no argument is donated; use jax.jit(step, donate_argnames='state')")
    if unknown := [part for part in exclude if not any(part in leaf.name for leaf in donated)]:
        raise ValueError(
            f"exclude={unknown} matches none of the donated leaves {[x.name for x in donated]}"
        )
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
        # Copies in a loop come first, because they cost the most and explain those around the loop.
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
            yield (
                f"{what}: growth of {grown:,} bytes{depth}, but only {explained:,} bytes are "
                "explained"
            )


def _unaliased(memory: Any) -> int:
    return memory.output_size_in_bytes - memory.alias_size_in_bytes


@dataclasses.dataclass(frozen=True)
class _ArgumentLeaf:
    name: str
    donated: bool
    parameter: int | None  # of the entry computation; None if JAX dropped it as unused
    nbytes: int


def _leaves(compiled: jax.stages.Compiled, module: HloModule) -> list[_ArgumentLeaf]:
    flat = jax.tree_util.tree_flatten_with_path(compiled.args_info)[0]
    # JAX drops unused arguments. In its public API, only their missing sharding shows that.
    tree: Any = compiled.in_tree
    kept = [sharding is not None for sharding in tree.flatten_up_to(compiled.input_shardings)]
    parameters = module.parameters
    first = len(parameters) - sum(kept)  # hoisted constants come before the arguments
    if first < 0:
        raise AliasingError(f"{sum(kept)} arguments do not match {len(parameters)} HLO parameters")
    numbers = [first + sum(kept[:i]) if keep else None for i, keep in enumerate(kept)]
    # Only the HLO has the Python names of arguments, as "state.arena['bfloat16']".
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
    """Returns every copy of an argument, largest first."""
    sizes = {leaf.parameter: leaf.nbytes for leaf in leaves if leaf.parameter is not None}
    tracer = CopyAnalysis(module, sizes)
    outputs = tracer.run(
        module.entry, [{(): frozenset({n})} for n in range(len(module.parameters))]
    )
    for out, parameter in module.aliases.items():
        tracer.note_store(module.entry, out, frozenset({parameter}), None)
    # A plain copy larger than XLA's memory besides the arguments can only go to an argument's own
    # buffer. If the step returns one argument as another, it goes to the other's buffer; else it is
    # a no-op.
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
