"""An upper bound of XLA's temp, from the traced step alone: no device, no compiler.

Every intermediate of the step at once, in full, none reusing another's bytes; a loop's body once,
and the larger of a conditional's branches. XLA fuses most of them away and lets the others share
buffers, so it needs less. What is updated in place in a donated argument (a scatter into a cache,
a kernel's aliased operand, a loop's carry) takes nothing: that XLA does so is what
`check_aliasing` proves of the compiled step.

What a loop reads of its stacks, a layer's weights, counts once: some backends copy it out (XLA's
CPU matmuls do). The matrix library's workspace is in no trace and is added as a constant.
"""

import math
from typing import Any

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


def temp_bound(step: Any, *args: Any, donated: int) -> int:
    """Bytes that XLA's temp cannot exceed.

    Args:
        step: traceable, called as step(*args); the arguments may be shapes.
        donated: which argument is donated.
    """
    closed = jax.make_jaxpr(step)(*args)
    counts = [len(jax.tree.leaves(arg)) for arg in args]
    first = sum(counts[:donated])
    mine = set(range(first, first + counts[donated]))
    return _bytes_of(closed.jaxpr, mine)[0] + LIBRARY_WORKSPACE


def _bytes_of(jaxpr: Any, owned: set[int]) -> tuple[int, list[bool]]:
    """(bytes of the intermediates, which outputs lie in an owned input)."""
    in_place = {var for i, var in enumerate(jaxpr.invars) if i in owned}
    total = 0
    for eqn in jaxpr.eqns:
        inside, kept = _equation(eqn, in_place)
        total += inside
        for var, free in zip(eqn.outvars, kept, strict=True):
            if free:
                in_place.add(var)
            else:
                total += _size(var.aval)
    return total, [isinstance(v, core.Var) and v in in_place for v in jaxpr.outvars]


def _equation(eqn: Any, in_place: set[Any]) -> tuple[int, list[bool]]:
    """(bytes inside the equation, which of its outputs cost nothing)."""
    name = eqn.primitive.name
    held = [isinstance(v, core.Var) and v in in_place for v in eqn.invars]
    inner = [_jaxpr(value) for value in eqn.params.values() if _jaxpr(value) is not None]
    if name == "cond":
        branches = [_bytes_of(_jaxpr(b), _places(held[1:])) for b in eqn.params["branches"]]
        kept = [all(each) for each in zip(*(kept for _, kept in branches), strict=True)]
        return max(size for size, _ in branches), kept
    if name == "while":
        condition, body = _jaxpr(eqn.params["cond_jaxpr"]), _jaxpr(eqn.params["body_jaxpr"])
        size, kept = _bytes_of(body, _places(held[eqn.params["cond_nconsts"] :]))
        return size + _bytes_of(condition, set())[0], kept
    if name == "scan":
        body = inner[0]
        size, kept = _bytes_of(body, _places(held))
        pairs_in = zip(eqn.invars, body.invars, strict=True)
        size += sum(_size(b.aval) for a, b in pairs_in if _size(a.aval) != _size(b.aval))
        pairs = zip(eqn.outvars, body.outvars, kept, strict=True)
        # What a loop stacks has a leading axis that its body's output has not.
        return size, [mine and _size(out.aval) == _size(var.aval) for out, var, mine in pairs]
    if name == "pallas_call" or "gpu" in name or "mosaic" in name:
        return 0, [_matches(var, eqn.invars, held) for var in eqn.outvars]
    if len(inner) == 1 and len(inner[0].invars) == len(eqn.invars):
        return _bytes_of(inner[0], _places(held))
    inside = sum(_bytes_of(jaxpr, set())[0] for jaxpr in inner)
    if name in _IN_PLACE or name.startswith("scatter"):
        return inside, [held[0] and _matches(var, eqn.invars, held) for var in eqn.outvars]
    return inside, [False] * len(eqn.outvars)


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
