"""An upper bound of XLA's temp, from the traced step alone: no device, no compiler.

Every intermediate of the step at once, in full, none reusing another's bytes; a loop's body once,
and the larger of a conditional's branches. XLA fuses most of them away and lets the others share
buffers, so it needs less. What is updated in place in a donated argument (a scatter into a cache,
a kernel's aliased operand, a loop's carry) takes nothing: that XLA does so is what
`check_aliasing` proves of the compiled step.

What a loop reads of its stacks, a layer's weights, counts once: some backends copy it out (XLA's
CPU matmuls do). The matrix library's workspace is in no trace and is added as a constant.
"""

import enum
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.extend import core

# cuBLAS on Hopper asks for 32 MiB, and XLA for 4 MiB more outside of loops.
LIBRARY_WORKSPACE = 36 * 2**20

# Outputs of these are their operand, updated or seen otherwise, when that may be overwritten.
_IN_PLACE = {
    "dynamic_update_slice",
    "reshape",
    "squeeze",
    "expand_dims",
    "copy",
    "copy_p",
    "optimization_barrier",
    "ref_get",
    "new_ref",
    "freeze",
    "mutable_array",
}
# With the operand's bytes they add or drop axes of one element, which no layout notices.
_VIEWS = {"squeeze", "broadcast_in_dim"}


class Bound(NamedTuple):
    """Of a step: bytes that XLA's temp cannot exceed, and what it returns, as shapes."""

    temp: int
    results: Any


def temp_bound(step: Any, *args: Any, donated: int, axes: Mapping[str, int] | None = None) -> Bound:
    """What one trace of a step says of its memory.

    Args:
        step: traceable, called as step(*args); the arguments may be shapes.
        donated: which argument is donated.
        axes: of the mesh over which the step is one device's, with their sizes.
    """
    traced = jax.make_jaxpr(step, axis_env=list((axes or {}).items()), return_shape=True)
    closed, results = traced(*args)
    counts = [len(jax.tree.leaves(arg)) for arg in args]
    first = sum(counts[:donated])
    mine = set(range(first, first + counts[donated]))
    return Bound(_bytes_of(closed.jaxpr, mine)[0] + LIBRARY_WORKSPACE, results)


class _Bytes(enum.Enum):
    """What a value costs: bytes of its own, those of what is updated in place, or none again."""

    NEW = enum.auto()
    OWNED = enum.auto()
    COUNTED = enum.auto()


def _bytes_of(jaxpr: Any, owned: set[int]) -> tuple[int, list[_Bytes]]:
    """(bytes of the intermediates, what each output costs whoever calls this)."""
    in_place = {var for i, var in enumerate(jaxpr.invars) if i in owned}
    # What is passed on as it came is the caller's, and counted there.
    total, made = 0, set[Any](jaxpr.invars)
    for eqn in jaxpr.eqns:
        inside, costs = _equation(eqn, in_place)
        total += inside
        for var, cost in zip(eqn.outvars, costs, strict=True):
            made.add(var)
            if cost is _Bytes.OWNED:
                in_place.add(var)
            elif cost is _Bytes.NEW:
                total += _size(var.aval)

    def outside(var: Any) -> _Bytes:
        if not isinstance(var, core.Var):
            return _Bytes.NEW
        if var in in_place:
            return _Bytes.OWNED
        return _Bytes.COUNTED if var in made else _Bytes.NEW

    return total, [outside(var) for var in jaxpr.outvars]


def _equation(eqn: Any, in_place: set[Any]) -> tuple[int, list[_Bytes]]:
    """(bytes inside the equation, what each of its outputs costs)."""
    name = eqn.primitive.name
    held = [isinstance(v, core.Var) and v in in_place for v in eqn.invars]
    inner = [_jaxpr(value) for value in eqn.params.values() if _jaxpr(value) is not None]
    if name == "cond":
        branches = [_bytes_of(_jaxpr(b), _places(held[1:])) for b in eqn.params["branches"]]
        each = zip(*(costs for _, costs in branches), strict=True)
        owned = [all(cost is _Bytes.OWNED for cost in costs) for costs in each]
        return max(size for size, _ in branches), _owned(owned)
    if name == "while":
        condition, body = _jaxpr(eqn.params["cond_jaxpr"]), _jaxpr(eqn.params["body_jaxpr"])
        size, costs = _bytes_of(body, _places(held[eqn.params["cond_nconsts"] :]))
        kept = _owned([cost is _Bytes.OWNED for cost in costs])
        return size + _bytes_of(condition, set())[0], kept
    if name == "scan":
        body = inner[0]
        size, costs = _bytes_of(body, _places(held))
        pairs_in = zip(eqn.invars, body.invars, strict=True)
        size += sum(_size(b.aval) for a, b in pairs_in if _size(a.aval) != _size(b.aval))
        pairs = zip(eqn.outvars, body.outvars, costs, strict=True)
        # What a loop stacks has a leading axis that its body's output has not.
        return size, _owned(
            [c is _Bytes.OWNED and _size(out.aval) == _size(var.aval) for out, var, c in pairs]
        )
    if name == "pallas_call" or "gpu" in name or "mosaic" in name:
        return 0, _owned([_matches(var, eqn.invars, held) for var in eqn.outvars])
    if len(inner) == 1 and len(inner[0].invars) == len(eqn.invars):
        return _bytes_of(inner[0], _places(held))  # a call: XLA inlines it
    inside = sum(_bytes_of(jaxpr, set())[0] for jaxpr in inner)
    if name in _VIEWS and not held[0] and _size(eqn.invars[0].aval) == _size(eqn.outvars[0].aval):
        return inside, [_Bytes.COUNTED]
    if name in _IN_PLACE or name.startswith("scatter"):
        return inside, _owned([held[0] and _matches(v, eqn.invars, held) for v in eqn.outvars])
    return inside, [_Bytes.NEW] * len(eqn.outvars)


def _owned(which: list[bool]) -> list[_Bytes]:
    return [_Bytes.OWNED if mine else _Bytes.NEW for mine in which]


def _matches(out: Any, operands: Any, held: list[bool]) -> bool:
    """Whether an operand that may be overwritten has the output's bytes."""
    return any(
        mine and _size(var.aval) == _size(out.aval)
        for var, mine in zip(operands, held, strict=True)
    )


def _places(held: list[bool]) -> set[int]:
    return {i for i, mine in enumerate(held) if mine}


def _jaxpr(value: Any) -> Any:
    if isinstance(value, core.ClosedJaxpr):
        return value.jaxpr
    return value if isinstance(value, core.Jaxpr) else None


def _size(aval: Any) -> int:
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or dtype is None:
        return 0
    return math.prod(shape) * getattr(dtype, "itemsize", 4)
