"""An upper bound on XLA's temp, from the trace of a step, without a device or a compiler.

The bound is the peak of the live intermediates: operations run in the order of the trace, and each
result has its own bytes until its last reader has run. XLA needs less, because it chooses a better
order, fuses most results away and writes others over their operands; tests compare the two. A loop
counts its body at the body's peak, and a conditional its larger branch. An update in place of a
donated argument (a scatter into a cache, a kernel's aliased operand, a loop's carry) counts as
nothing. `check_aliasing` proves that the compiled step does update these in place.

A loop's slice of its stacked operands, such as a layer's weights, counts once, because some
backends copy it (XLA's CPU matmuls do). A trace does not show the matrix library's workspace, so
the bound adds it as a constant.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.extend import core

from jaxattn.core.dispatch import kernels_untraced

# cuBLAS on Hopper takes 32 MiB, and XLA takes 4 MiB more outside of loops.
LIBRARY_WORKSPACE = 36 * 2**20

# Outputs of these primitives reuse their operand, if that may be overwritten.
_IN_PLACE = {
    "dynamic_update_slice",
    "reshape",
    "squeeze",
    "expand_dims",
    "copy",
    "copy_p",
    "ref_get",
    "new_ref",
    "freeze",
    "mutable_array",
}
# With equal bytes, these only add or drop axes of size one, which do not change the layout.
_VIEWS = {"squeeze", "broadcast_in_dim"}


class TempBound(NamedTuple):
    """An upper bound on the bytes of XLA's temp in a step, and the shapes that it returns."""

    temp: int
    results: Any


def temp_bound(
    step: Any, *args: Any, donated: int, axes: Mapping[str, int] | None = None
) -> TempBound:
    """Traces a step and returns a bound on its memory.

    Args:
        step: A traceable function, called as step(*args); the arguments may be shapes.
        donated: The index of the donated argument.
        axes: The mesh axes and their sizes, for a step that is one device's part.
    """
    traced = jax.make_jaxpr(step, axis_env=list((axes or {}).items()), return_shape=True)
    with kernels_untraced(True):  # memory inside a kernel is no array of XLA
        closed, results = traced(*args)
    counts = [len(jax.tree.leaves(arg)) for arg in args]
    first = sum(counts[:donated])
    mine = set(range(first, first + counts[donated]))
    return TempBound(_peak(closed.jaxpr, mine)[0] + LIBRARY_WORKSPACE, results)


# The cost of a result for the caller: NEW has its own bytes; OWNED is a donated buffer, updated in
# place; an integer is the index of the operand whose bytes the result passes on or views.
NEW, OWNED = "new", "owned"
Cost = str | int


def _peak(jaxpr: Any, donated_indices: set[int]) -> tuple[int, list[Cost]]:
    """Returns (the peak bytes besides the arguments, the cost of each output for the caller)."""
    donated = {var for i, var in enumerate(jaxpr.invars) if i in donated_indices}
    # The variable whose bytes a view shares. The caller holds those of arguments.
    root = {var: var for var in jaxpr.invars}
    inner_bytes, created = list[int](), list[list[Any]]()
    for eqn in jaxpr.eqns:
        size, costs = _equation(eqn, donated)
        inner_bytes.append(size)
        created.append([])
        for var, cost in zip(eqn.outvars, costs, strict=True):
            if cost == OWNED:
                donated.add(var)
            if isinstance(cost, int) and isinstance(eqn.invars[cost], core.Var):
                root[var] = root.get(eqn.invars[cost], var)
                continue
            root[var] = var
            if cost != OWNED:
                created[-1].append(var)

    last = {root.get(var): len(jaxpr.eqns) for var in jaxpr.outvars if isinstance(var, core.Var)}
    for i, eqn in reversed(list(enumerate(jaxpr.eqns))):
        for var in (*eqn.invars, *eqn.outvars):
            if isinstance(var, core.Var):
                last.setdefault(root.get(var), i)
    ending = [list[Any]() for _ in range(len(jaxpr.eqns) + 1)]
    for var in (var for some in created for var in some):
        ending[last[var]].append(var)
    alive = peak = 0
    for i, size in enumerate(inner_bytes):
        alive += sum(_size(var.aval) for var in created[i])
        peak = max(peak, alive + size)
        alive -= sum(_size(var.aval) for var in ending[i])

    places = {var: i for i, var in enumerate(jaxpr.invars)}

    def outside(var: Any) -> Cost:
        if not isinstance(var, core.Var):
            return NEW
        return OWNED if var in donated else places.get(root.get(var), NEW)

    return peak, [outside(var) for var in jaxpr.outvars]


def _equation(eqn: Any, donated: set[Any]) -> tuple[int, list[Cost]]:
    """Returns (the bytes inside the equation besides its outputs, the cost of each output)."""
    name = eqn.primitive.name
    is_donated = [isinstance(v, core.Var) and v in donated for v in eqn.invars]
    inner = [_jaxpr(value) for value in eqn.params.values() if _jaxpr(value) is not None]
    if name == "cond":
        branches = [_peak(_jaxpr(b), _places(is_donated[1:])) for b in eqn.params["branches"]]
        each = zip(*(costs for _, costs in branches), strict=True)
        owned = [all(cost == OWNED for cost in costs) for costs in each]
        return max(size for size, _ in branches), _owned(owned)
    if name == "while":
        condition, body = _jaxpr(eqn.params["cond_jaxpr"]), _jaxpr(eqn.params["body_jaxpr"])
        size, costs = _peak(body, _places(is_donated[eqn.params["cond_nconsts"] :]))
        kept = _owned([cost == OWNED for cost in costs])
        return max(size, _peak(condition, set())[0]), kept
    if name == "scan":
        body = inner[0]
        size, costs = _peak(body, _places(is_donated))
        pairs_in = zip(eqn.invars, body.invars, strict=True)
        size += sum(_size(b.aval) for a, b in pairs_in if _size(a.aval) != _size(b.aval))
        pairs = zip(eqn.outvars, body.outvars, costs, strict=True)
        # A stacked output has a leading axis that the body's output lacks.
        return size, _owned(
            [c == OWNED and _size(out.aval) == _size(var.aval) for out, var, c in pairs]
        )
    if name == "pallas_call" or "gpu" in name or "mosaic" in name:
        return 0, _owned([_matches(var, eqn.invars, is_donated) for var in eqn.outvars])
    if len(inner) == 1 and len(inner[0].invars) == len(eqn.invars):
        size, costs = _peak(inner[0], _places(is_donated))  # a call, which XLA inlines
        outs = zip(eqn.outvars, costs, strict=True)
        return size - sum(_size(var.aval) for var, cost in outs if cost == NEW), costs
    inside = max((_peak(jaxpr, set())[0] for jaxpr in inner), default=0)
    if name == "optimization_barrier":  # each result is its operand
        return inside, [OWNED if mine else place for place, mine in enumerate(is_donated)]
    if (
        name in _VIEWS
        and not is_donated[0]
        and _size(eqn.invars[0].aval) == _size(eqn.outvars[0].aval)
    ):
        return inside, [0]
    if name in _IN_PLACE or name.startswith("scatter"):
        return inside, _owned(
            [is_donated[0] and _matches(v, eqn.invars, is_donated) for v in eqn.outvars]
        )
    return inside, [NEW] * len(eqn.outvars)


def _owned(is_donated: list[bool]) -> list[Cost]:
    return [OWNED if mine else NEW for mine in is_donated]


def _matches(out: Any, operands: Any, is_donated: list[bool]) -> bool:
    """Whether an operand that may be overwritten has as many bytes as the output."""
    return any(
        mine and _size(var.aval) == _size(out.aval)
        for var, mine in zip(operands, is_donated, strict=True)
    )


def _places(is_donated: list[bool]) -> set[int]:
    return {i for i, mine in enumerate(is_donated) if mine}


def _jaxpr(value: Any) -> Any:
    if isinstance(value, core.ClosedJaxpr):
        return value.jaxpr
    return value if isinstance(value, core.Jaxpr) else None


def _size(aval: Any) -> int:
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or dtype is None:
        return 0
    return math.prod(shape) * getattr(dtype, "itemsize", 4)
