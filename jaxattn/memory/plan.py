"""A memory plan: items, each with its bytes and its reason; the cache gets what they leave.

Bytes of an array come from `nbytes` alone. The plan counts with it, and what is allocated is
compared with the plan by it, so the two cannot drift.

A split-KV kernel's partial results may be sized by the longest row that the cache can hold. Then
cache and workspace depend on each other: more pages need more workspace, which leaves fewer pages.
`solve` finds the most pages of which both fit.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

MIB, GIB = 2**20, 2**30


class PlanError(ValueError):
    """The engine would take more memory than there is. Raised before it takes any.

    Attributes:
        plan: the plan that does not fit, for its table; None if it could not be made.
        advice: what would make it fit, each checked by planning it.
    """

    def __init__(
        self, message: str, plan: "MemoryPlan | None" = None, advice: tuple[str, ...] = ()
    ):
        super().__init__(message)
        self.plan, self.advice = plan, advice


@dataclasses.dataclass(frozen=True)
class PlanItem:
    """One line of a plan.

    Attributes:
        why: what the bytes are for, or what decides how many they are.
        parts: what lies in them. Parts of an arena overlay, so they do not add up.
        basis: how the bytes are known: "shapes" (exact), "compiled" (what XLA says of the
            executables), "bound" (at most this, from shapes), "measured" or "assumed".
        outside: whether they lie outside JAX's allocator (code, the driver's own).
    """

    name: str
    nbytes: int
    why: str
    parts: tuple["PlanItem", ...] = ()
    basis: str = "shapes"
    outside: bool = False


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """What a plan may take of a device.

    Attributes:
        device: its name.
        total: its bytes.
        utilization: fraction of `total`, not of what is free, as is JAX's own
            XLA_PYTHON_CLIENT_MEM_FRACTION: arrays and XLA's temp may take `utilization * total`.
            Loaded code, the driver's own memory and what other processes hold of the device come
            on top and must fit in the rest, or the arrays get less: what is free beside them.
        limit: the most that JAX's allocator will take, if that is known.
    """

    device: str
    total: int
    utilization: float = 1.0
    limit: int | None = None

    def __post_init__(self) -> None:
        check_utilization(self.utilization)

    def arrays(self, outside: int = 0) -> int:
        """Bytes for arrays and temp beside `outside` bytes of code and driver."""
        within = min(int(self.total * self.utilization), self.total - outside)
        return max(within if self.limit is None else min(within, self.limit), 0)

    def reason(self, outside: int = 0) -> str:
        """What decides `arrays`: the fraction, what others hold of the device, or the allocator."""
        allowed = self.arrays(outside)
        if self.limit is not None and allowed == self.limit:
            return f"the most that JAX's allocator takes of {self.total:,} ({self.device})"
        if allowed < int(self.total * self.utilization):
            return f"what {outside:,} outside of it leave of {self.total:,} ({self.device})"
        return f"{self.utilization:g} of {self.total:,} ({self.device})"


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device.

    Attributes:
        budget: what they may be; None where the device's memory is unknown.
        title: what is planned, in a line.
        facts: what follows from it (tokens that fit, rows at full length), name -> value.
        notes: every assumption.
        choices: each limit that nobody fixed, with its value and why (default_limits.py).
        limits: the engine's, of which this is the plan; None of a plan that no engine makes.
    """

    items: tuple[PlanItem, ...]
    budget: MemoryBudget | None = None
    title: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    limits: Any = None

    @property
    def total(self) -> int:
        return sum(item.nbytes for item in self.items)

    @property
    def inside(self) -> int:
        """The most that JAX's allocator holds at any time of serving: arrays and temp."""
        return sum(item.nbytes for item in self.items if not item.outside)

    @property
    def outside(self) -> int:
        """Code and the driver's own, which no allocator counts."""
        return sum(item.nbytes for item in self.items if item.outside)

    @property
    def reserve(self) -> int | None:
        """What stays free of the budget; negative if the plan does not fit."""
        return None if self.budget is None else self.budget.arrays(self.outside) - self.inside

    def __getitem__(self, name: str) -> int:
        return {item.name: item.nbytes for item in self.items}[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "title": self.title,
            "items": [dataclasses.asdict(item) for item in self.items],
            "total": self.total,
            "inside_jax": self.inside,
            "outside_jax": self.outside,
            "reserve": self.reserve,
            "budget": None if self.budget is None else dataclasses.asdict(self.budget),
            "facts": dict(self.facts),
            "notes": list(self.notes),
            "choices": list(self.choices),
        }

    def check(self, advice: Callable[[], tuple[str, ...]] = tuple) -> None:
        """Raises PlanError if the plan is larger than its budget, with the line that goes over it.

        Args:
            advice: called only then; what would make it fit.
        """
        if self.budget is None or self.reserve is None or self.reserve >= 0:
            return
        largest = max(self.items, key=lambda item: item.nbytes)
        allowed, held, over = self.budget.arrays(self.outside), 0, largest
        # With nothing allowed, it is what lies outside that leaves nothing.
        for item in self.items:
            held += item.nbytes if item.outside == (allowed == 0) else 0
            if held > (allowed or self.budget.total * (1 - self.budget.utilization)):
                over = item
                break
        also = f"; the largest is the {largest.name} with {largest.nbytes:,} ({largest.why})"
        self.refuse(
            f"{self.inside:,} bytes are needed and {allowed:,} are allowed, "
            f"{self.budget.reason(self.outside)}; "
            f"the line that does not fit is the {over.name} with {over.nbytes:,} ({over.why})"
            + ("" if largest is over else also),
            advice(),
        )

    def refuse(self, reason: str, advice: tuple[str, ...]) -> NoReturn:
        """Raises PlanError with what would make it fit."""
        fix = f"; what would make it fit: {' or '.join(advice)}" if advice else ""
        raise PlanError(reason + fix, self, advice)


def nbytes(tree: Any) -> int:
    """Bytes of arrays or shapes: the one function that the plan and the engine count by."""
    leaves = jax.tree.leaves(tree)
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)


def nbytes_each(tree: Any) -> int:
    """Bytes of arrays on each of their devices."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def check_allocated(what: str, tree: Any, planned: int) -> None:
    """Raises PlanError unless the arrays take exactly what the plan says, on each device."""
    if (got := nbytes_each(tree)) != planned:
        raise PlanError(f"{what}: the plan says {planned:,} bytes and {got:,} were allocated")


@dataclasses.dataclass(frozen=True)
class CapacitySolution:
    """The most pages that fit, and the steps that led there: (pages at most, pages at least)."""

    pages: int
    workspace: int
    steps: tuple[tuple[int, int], ...]


def solve(
    available: int,
    page_bytes: int,
    workspace: Callable[[int], int],
    *,
    most: int | None = None,
) -> CapacitySolution:
    """The largest number of pages with `pages * page_bytes + workspace(pages) <= available`.

    From both sides: the pages that fit beside no workspace are too many, those that fit beside the
    workspace of too many are few enough. Each side gives the other a better one, and both only
    ever move towards each other; where rounding stops them apart, halving finds the rest. The
    result is feasible and the next page is not.

    Args:
        available: bytes that pages and workspace share.
        workspace: bytes for a number of pages; it must not fall with more of them.
        most: no more pages than this are wanted.

    Returns:
        0 pages if not even one fits.
    """
    if page_bytes < 1:
        raise ValueError(f"page_bytes must be positive; got {page_bytes}")

    def fitting(reserved: int) -> int:
        pages = max(available - reserved, 0) // page_bytes
        return pages if most is None else min(pages, most)

    high = fitting(0)
    low = fitting(workspace(high))
    steps = [(high, low)]
    while low < high:
        tighter = max(min(fitting(workspace(low)), high), low)
        raised = max(min(fitting(workspace(tighter)), tighter), low)
        if (tighter, raised) == (high, low):
            middle = (low + high + 1) // 2
            fits = middle * page_bytes + workspace(middle) <= available
            tighter, raised = (high, middle) if fits else (middle - 1, low)
        high, low = tighter, raised
        steps.append((high, low))
    if low * page_bytes + workspace(low) > available:
        low = 0  # not even the workspace of an empty cache fits
    return CapacitySolution(low, workspace(low), tuple(steps))


def check_utilization(value: Any) -> None:
    """Raises ValueError unless it is a fraction above 0 and up to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(
            "utilization is a fraction of the device's total memory: use above 0 and at most 1; "
            f"got {value!r}"
        )
