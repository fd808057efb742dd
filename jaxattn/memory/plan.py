"""A memory plan: items with their bytes and their reasons; the cache gets the rest.

`nbytes` is the only function that computes the bytes of an array. Both the plan and the check of
what was allocated use it, so the two cannot drift.

The longest row that the cache can hold may decide the size of a split-KV kernel's partial results.
Then cache and workspace depend on each other: more pages need more workspace, which leaves fewer
pages. `solve` finds the largest number of pages with which both fit.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

MIB, GIB = 2**20, 2**30


class PlanError(ValueError):
    """The engine needs more memory than there is. The engine raises it before it allocates.

    Attributes:
        plan: The plan that does not fit, for its table; None if it could not be made.
        advice: Changes that would make the plan fit, each verified by planning it.
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
        why: The purpose of the bytes, or what decides their number.
        parts: The items inside this one. Parts of an arena overlay, so they do not add up.
        basis: The source of the number: "shapes" (exact), "compiled" (XLA's statistics of the
            executables), "bound" (an upper bound from shapes), "measured" or "assumed".
        outside: Whether the bytes lie outside JAX's allocator (code, the driver's own memory).
    """

    name: str
    nbytes: int
    why: str
    parts: tuple["PlanItem", ...] = ()
    basis: str = "shapes"
    outside: bool = False


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """The memory of a device that a plan may use.

    Attributes:
        device: The name of the device.
        total: The total bytes of the device.
        utilization: The fraction of `total`, not of the free memory, that arrays and XLA's temp may
            take; XLA_PYTHON_CLIENT_MEM_FRACTION has the same meaning. Loaded code, the driver's own
            memory and other processes must fit in the rest. If they do not, arrays get only what
            they leave.
        limit: The maximum bytes of JAX's allocator; None if unknown.
    """

    device: str
    total: int
    utilization: float = 1.0
    limit: int | None = None

    def __post_init__(self) -> None:
        check_utilization(self.utilization)

    def arrays(self, outside: int = 0) -> int:
        """Returns the bytes for arrays and temp, given `outside` bytes of code and driver."""
        within = min(int(self.total * self.utilization), self.total - outside)
        return max(within if self.limit is None else min(within, self.limit), 0)

    def reason(self, outside: int = 0) -> str:
        """Returns the limit of `arrays`: the fraction, the memory outside, or the allocator."""
        allowed = self.arrays(outside)
        if self.limit is not None and allowed == self.limit:
            return f"the limit of JAX's allocator, of {self.total:,} in all ({self.device})"
        if allowed < int(self.total * self.utilization):
            return f"{self.total:,} less {outside:,} outside of JAX's allocator ({self.device})"
        return f"{self.utilization:g} of {self.total:,} ({self.device})"


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The planned bytes of one device.

    Attributes:
        budget: The memory that the plan may use; None if the device's memory is unknown.
        title: The title of the plan, a line.
        facts: Results of the plan (tokens that fit, rows at full length) as pairs (name, value).
        notes: The assumptions of the plan.
        choices: Each limit that the user left out, with its value and reason (default_limits.py).
        limits: The `Limits` that the plan is for; None if the plan is not of an engine.
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
        """The peak bytes of JAX's allocator while the engine serves: arrays and temp."""
        return sum(item.nbytes for item in self.items if not item.outside)

    @property
    def outside(self) -> int:
        """The bytes of code and of the driver, which no allocator counts."""
        return sum(item.nbytes for item in self.items if item.outside)

    @property
    def reserve(self) -> int | None:
        """The bytes of the budget that stay free; negative if the plan does not fit."""
        return None if self.budget is None else self.budget.arrays(self.outside) - self.inside

    def __getitem__(self, name: str) -> int:
        return {item.name: item.nbytes for item in self.items}[name]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
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
        """Raises PlanError if the plan exceeds its budget; the message names the item over it.

        Args:
            advice: A function that returns changes that would make the plan fit. It is called only
                if the plan does not fit.
        """
        if self.budget is None or self.reserve is None or self.reserve >= 0:
            return
        largest = max(self.items, key=lambda item: item.nbytes)
        allowed, held, excess = self.budget.arrays(self.outside), 0, largest
        # If nothing is allowed, the items outside of JAX's allocator exceed the budget.
        for item in self.items:
            held += item.nbytes if item.outside == (allowed == 0) else 0
            if held > (allowed or self.budget.total * (1 - self.budget.utilization)):
                excess = item
                break
        also = f"; the largest is the {largest.name} with {largest.nbytes:,} ({largest.why})"
        self.refuse(
            f"{self.inside:,} bytes are needed, but only {allowed:,} are allowed: "
            f"{self.budget.reason(self.outside)}; "
            f"the item that does not fit is the {excess.name} with {excess.nbytes:,} ({excess.why})"
            + ("" if largest is excess else also),
            advice(),
        )

    def refuse(self, reason: str, advice: tuple[str, ...]) -> NoReturn:
        """Raises PlanError with the reason and the advice."""
        fix = f"; to make it fit, use {' or '.join(advice)}" if advice else ""
        raise PlanError(reason + fix, self, advice)


def nbytes(tree: Any) -> int:
    """Returns the bytes of arrays or shapes. Both the plan and the engine count with it."""
    leaves = jax.tree.leaves(tree)
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)


def nbytes_each(tree: Any) -> int:
    """Returns the bytes of arrays on each of their devices."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def check_allocated(name: str, tree: Any, planned: int) -> None:
    """Raises PlanError unless the arrays take exactly the planned bytes on each device."""
    if (got := nbytes_each(tree)) != planned:
        raise PlanError(f"{name}: the plan has {planned:,} bytes, but {got:,} were allocated")


@dataclasses.dataclass(frozen=True)
class CapacitySolution:
    """The most pages that fit, and the search's bounds: (pages at most, pages at least)."""

    pages: int
    workspace: int
    steps: tuple[tuple[int, int], ...]


def solve(
    available: int,
    page_bytes: int,
    workspace: Callable[[int], int],
    *,
    max_pages: int | None = None,
) -> CapacitySolution:
    """Finds the largest number of pages with `pages * page_bytes + workspace(pages) <= available`.

    The search works from both sides. The pages that fit without a workspace are an upper bound, and
    those that fit with the workspace of the upper bound are a lower bound. Each bound improves the
    other. Where rounding stops them before they meet, bisection finds the rest. The result fits,
    and one more page does not.

    Args:
        available: The bytes that pages and workspace share.
        workspace: The bytes of the workspace for a number of pages; it must be non-decreasing.
        max_pages: The maximum number of pages; None for no maximum.

    Returns:
        The solution, with 0 pages if not even one fits.
    """
    if page_bytes < 1:
        raise ValueError(f"page_bytes must be positive; got {page_bytes}")

    def fitting(reserved: int) -> int:
        pages = max(available - reserved, 0) // page_bytes
        return pages if max_pages is None else min(pages, max_pages)

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
    """Raises ValueError unless the value is a fraction above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(
            "utilization must be a fraction of the device's total memory, above 0 and at most 1; "
            f"got {value!r}"
        )
