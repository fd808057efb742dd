"""What memory an engine will take, to the byte and with the reason, before a cache is allocated.

    total = weights + state (arena, caches, recurrent states)
          + step inputs and outputs + XLA's temp and code

Weights and state come from shapes alone; the rest from `compiled.memory_analysis()` of every
executable. They run one at a time, so inputs, outputs and temp are the largest of any; code is
loaded for all of them, so it is the sum.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.models.hybrid import DecodeState, HybridConfig, op_scratch


class PlanError(ValueError):
    """The engine would take more memory than the device has. Raised before it takes any."""


@dataclasses.dataclass(frozen=True)
class Item:
    """One line of a plan.

    Attributes:
        why: what the bytes are for, or what decides how many they are.
        parts: what lies in them. Parts of an arena overlay, so they do not add up.
    """

    name: str
    nbytes: int
    why: str
    parts: tuple["Item", ...] = ()


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device."""

    items: tuple[Item, ...]

    @property
    def total(self) -> int:
        return sum(item.nbytes for item in self.items)

    def __getitem__(self, name: str) -> int:
        return {item.name: item.nbytes for item in self.items}[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"items": [dataclasses.asdict(item) for item in self.items], "total": self.total}

    def check(self, device: jax.Device) -> None:
        """Raises PlanError if the device cannot hold the plan."""
        limit = device_bytes(device)
        if limit is not None and self.total > limit:
            largest = max(self.items, key=lambda item: item.nbytes)
            raise PlanError(
                f"{self.total:,} bytes are needed and {device.device_kind} has {limit:,}; the "
                f"largest part is the {largest.name} with {largest.nbytes:,} ({largest.why})"
            )


def device_bytes(device: jax.Device) -> int | None:
    """What JAX may allocate on the device, on a CPU the machine's memory; None if nothing says."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    names = getattr(os, "sysconf_names", {})
    if device.platform == "cpu" and "SC_PHYS_PAGES" in names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def resident_items(
    config: HybridConfig, params: Any, state: DecodeState, *, batch: int, max_pages: int
) -> tuple[Item, ...]:
    """Weights and state, from arrays or from their shapes."""
    weights = jax.tree.leaves(params)
    count = sum(leaf.size for leaf in weights)
    dtypes = "/".join(sorted({leaf.dtype.name for leaf in weights}))
    layers, pages, page_size, width = state.kv_cache.shape
    gdn_layers, slots, taps, channels = state.conv_state.shape
    heads = "x".join(map(str, state.ssm_state.shape[2:]))
    return (
        Item("weights", _nbytes(weights), f"{count:,} parameters in {dtypes}, only read"),
        Item(
            "arena",
            _nbytes(state.arena),
            f"scratch of {batch} rows; all layers use the same, so it does not grow with them",
            _arena_parts(config, batch, max_pages),
        ),
        Item(
            "kv cache",
            _nbytes(state.kv_cache),
            f"{layers} MLA layers x {pages} pages x {page_size} tokens x {width} "
            f"{state.kv_cache.dtype.name}",
        ),
        Item(
            "conv state",
            _nbytes(state.conv_state),
            f"{gdn_layers} GDN layers x {slots} slots x last {taps} inputs x {channels} "
            f"{state.conv_state.dtype.name}",
        ),
        Item(
            "ssm state",
            _nbytes(state.ssm_state),
            f"{gdn_layers} GDN layers x {slots} slots x {heads} {state.ssm_state.dtype.name}",
        ),
    )


def plan_memory(
    resident: tuple[Item, ...], executables: Mapping[str, jax.stages.Compiled]
) -> MemoryPlan:
    """The whole plan: `resident_items` and what the executables add.

    Args:
        executables: name -> compiled step; all take the same weights and donate the same state.
    """
    held = sum(item.nbytes for item in resident)
    memory: dict[str, Any] = {name: step.memory_analysis() for name, step in executables.items()}
    in_out = {
        name: max(stats.argument_size_in_bytes - held, 0)
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        for name, stats in memory.items()
    }
    temp = {name: stats.temp_size_in_bytes for name, stats in memory.items()}
    code = {name: stats.generated_code_size_in_bytes for name, stats in memory.items()}
    return MemoryPlan(
        (
            *resident,
            Item("step inputs and outputs", max(in_out.values()), _largest(in_out)),
            Item("xla temp", max(temp.values()), _largest(temp)),
            Item("xla code", sum(code.values()), f"of {len(code)} executables together"),
        )
    )


def _largest(sizes: Mapping[str, int]) -> str:
    return "the largest of " + ", ".join(f"{name}: {size:,}" for name, size in sizes.items())


def _arena_parts(config: HybridConfig, batch: int, max_pages: int) -> tuple[Item, ...]:
    return tuple(
        Item(f"{spec.op} {name}", region.nbytes, f"{region}, overlaid with the other ops'")
        for spec in op_scratch(config, batch, max_pages=max_pages)
        for name, region in (*spec.regions, *spec.persistent)
    )


def _nbytes(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)
