"""The search for an engine's limits on a GPU: from fast limits to fast limits that fit."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxattn.engine.startup.executable_memory import ExecutableMemory
from jaxattn.engine.startup.memory_plan import fill, page_bytes, plan_engine
from jaxattn.engine.steps.step_catalog import all_steps
from jaxattn.limits import Limits
from jaxattn.memory.device_memory import DeviceMemory
from jaxattn.memory.plan import GIB, MIB, MemoryPlan, nbytes
from jaxattn.models.caches.layer_cache import CacheSize
from jaxattn.models.interface import Model

BATCH = 256
DECODE_BUCKETS = (1, 8, 32, 128)
PREFILL_TOKENS = 8192
PREFILL_ROWS = 16
PREFILL_BUCKETS = (256, 1024, 2048, 4096)
# Half of the prompt tokens of other steps, so that decoding rows wait half as long.
MIXED_TOKENS = 4096
# One size for all prompts, which suits short ones too.
REPRODUCIBLE_CHUNK = 1024
UTILIZATION = 0.9
# The search does not lower open limits below these as long as it can lower others.
LEAST_CONTEXT, LEAST_CHUNK = 4096, 256
# Open limits that decide what the search lowers.
REDUCED = {"max_model_len", "batch", "prefill_chunk", "prefill_rows"}
# The fraction of the tokens that fit before any step has run. The driver takes some later.
CONTEXT_SHARE = 7 / 8
# The largest fractions, after weights and steps, for the states of rows and of prefixes.
STATES_SHARE, CHECKPOINTS_SHARE = 1 / 3, 1 / 8
# If all rows at full length take at most this fraction, the cache holds them all, and the number of
# pages needs no measurement.
WHOLE_SHARE = 1 / 4
DRIVER = 1 * GIB  # an upper bound of what CUDA and its libraries take once steps have run

type Bounds = Callable[[Limits], Mapping[str, ExecutableMemory]]


@dataclasses.dataclass(frozen=True)
class LimitsChoice:
    """Limits without anything left open.

    Attributes:
        reasons: A line for each chosen limit: its name, its value and the reason.
        bounds: Bounds of the largest steps by name, if the search traced them. The steps of
            `limits` need no more.
    """

    limits: Limits
    reasons: tuple[str, ...] = ()
    bounds: Mapping[str, ExecutableMemory] = dataclasses.field(default_factory=dict)


def limit_reason(name: str, value: Any, why: str) -> str:
    if isinstance(value, tuple):
        said = ",".join(map(str, value)) or "none"
    else:
        said = f"{value:,}" if isinstance(value, int) else f"{value}"
    return f"{name} {said}: {why}"


@dataclasses.dataclass(kw_only=True)
class LimitsSearch:
    """Searches for limits that fit a GPU.

    Attributes:
        requested: The given limits, whose `unset` names the open ones. The other attributes are the
            arguments of `choose_limits`.
        reasons: The reasons of the limits chosen so far, by name.
    """

    requested: Limits
    model: Model
    memory: DeviceMemory
    params: Any
    other_bytes: Mapping[str, Any]
    bounds: Bounds
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)

    def choose(self) -> LimitsChoice:
        limits = initial = self._choose_gpu_limits()
        initial_reasons = dict(self.reasons)
        limits = self._fit_states(limits)
        limits = self._fit_one_row(limits, {})
        executables: Mapping[str, ExecutableMemory] = {}
        fits = self._fits(limits, executables)
        if fits and self.requested.unset & REDUCED:
            # Tracing takes seconds, so it comes after the plan of only weights and state.
            executables = self.bounds(limits)
            while (lower := self._fit_one_row(limits, executables)) != limits:
                limits = lower
                executables = self.bounds(limits)
            fits = self._fits(limits, executables)
        if fits:
            limits = self._context(limits, executables)
        elif not self._pages(limits, executables):
            # Then the plan of the original limits gives advice.
            limits, self.reasons = initial, initial_reasons
        limits = self._checkpoints(limits, executables)
        limits = self._choose_utilization(limits, executables)
        self._explain_buckets(limits)
        return LimitsChoice(limits, tuple(self.reasons.values()), executables if fits else {})

    def _explain(self, name: str, value: Any, why: str) -> None:
        self.reasons[name] = limit_reason(name, value, why)

    def _choose_gpu_limits(self) -> Limits:
        """Returns the limits of a GPU if everything fits."""
        requested, unset, chosen = self.requested, self.requested.unset, {}

        def choose(name: str, value: Any, why: str) -> None:
            if name in unset:
                chosen[name] = value
                self._explain(name, value, why)

        length, why = self.model.max_position_embeddings, "the model's own context length"
        if requested.num_pages and requested.num_pages * requested.page_tokens < length:
            length, why = (
                requested.num_pages * requested.page_tokens,
                f"the tokens that {requested.num_pages:,} pages hold",
            )
        choose("max_model_len", length, why)
        length = chosen.get("max_model_len", requested.max_model_len)
        rows = max(BATCH, *requested.decode_buckets, 1)
        if requested.num_pages:
            rows = max(min(rows, requested.num_pages), *requested.decode_buckets, 1)
        rows = -(-rows // requested.groups) * requested.groups
        choose("batch", rows, "rows that a GPU decodes together")
        if requested.reproducible:
            choose("prefill_chunk", min(REPRODUCIBLE_CHUNK, length), "one shape for all prompts")
            rows = PREFILL_ROWS * requested.groups
            choose("prefill_rows", rows, "short prompts that one step processes whole")
            for name in ("decode_buckets", "prefill_buckets"):
                choose(name, (), "reproducible=True uses one shape")
            return dataclasses.replace(requested, **chosen)
        choose(
            "prefill_rows",
            PREFILL_ROWS * requested.groups,
            "short prompts that one step processes together",
        )
        tokens = requested.prefill_tokens or PREFILL_TOKENS
        chunk = min(max(tokens, *requested.prefill_buckets, 1), length)
        choose("prefill_chunk", chunk, f"a step processes up to {tokens:,} prompt tokens")
        chunk = min(chosen.get("prefill_chunk", requested.prefill_chunk), length)
        if requested.prefill_tokens is None and unset & {"prefill_chunk", "prefill_rows"}:
            chosen["prefill_tokens"] = max(tokens, chunk)
        choose("prefill_buckets", _below(PREFILL_BUCKETS, chunk), "shorter chunks")
        if requested.mixed_tokens is None:
            # The smallest compiled size, if given limits make that one larger.
            mixed = max(MIXED_TOKENS, dataclasses.replace(requested, **chosen).prefill_sizes[0])
            chosen["mixed_tokens"] = mixed
            why = "prompt tokens in a step that also decodes other rows"
            self._explain("mixed_tokens", mixed, why)
        rows = chosen.get("batch", requested.batch)
        choose("decode_buckets", _below(DECODE_BUCKETS, rows, requested.groups), "fewer rows")
        return dataclasses.replace(requested, **chosen)

    # --- what fits

    def _plan(self, limits: Limits, executables: Mapping[str, ExecutableMemory]) -> MemoryPlan:
        return plan_engine(
            self.model, limits, self.memory, self.params, executables, **self.other_bytes
        )

    def _with_utilization(self, limits: Limits) -> Limits:
        """Returns the limits with a utilization, which decides the number of pages."""
        return dataclasses.replace(limits, utilization=limits.utilization or UTILIZATION)

    def _pages(self, limits: Limits, executables: Mapping[str, ExecutableMemory]) -> int:
        """Returns the pages that fit; 0 if even weights, states and steps do not."""
        limits = self._with_utilization(limits)
        if limits.num_pages:
            plan = self._plan(dataclasses.replace(limits, utilization=None), executables)
            return 0 if plan.reserve is None or plan.reserve < 0 else limits.num_pages
        least = self._plan(dataclasses.replace(limits, num_pages=1), executables)
        if least.reserve is None or least.reserve < 0:
            return 0
        return fill(
            self.model, limits, self.memory, self.params, executables, **self.other_bytes
        ).pages

    def _free_bytes(self, limits: Limits, executables: Mapping[str, ExecutableMemory]) -> int:
        """Returns the bytes that weights and steps leave for states and pages."""
        one = dataclasses.replace(self._with_utilization(limits), num_pages=1)
        plan = self._plan(one, executables)
        return (plan.reserve or 0) + self._slot * limits.rows_per_group

    @property
    def _slot(self) -> int:
        """The bytes of a row's states in all layers."""
        one, two = (
            sum(
                nbytes(cache.shapes(CacheSize(pages=1, slots=slots))) for cache in self.model.caches
            )
            for slots in (1, 2)
        )
        return two - one

    def _fits(self, limits: Limits, executables: Mapping[str, ExecutableMemory]) -> bool:
        """Whether the cache holds a row, of the shortest context if the context is open."""
        return self._pages(limits, executables) >= _least_pages(self.requested, limits)

    def _fit_states(self, limits: Limits) -> Limits:
        """Lowers the batch until its states leave most of the room to pages."""
        if not self._slot or "batch" not in self.requested.unset:
            return limits
        most = self._free_bytes(limits, {}) * STATES_SHARE
        while self._slot * limits.rows_per_group > most and _can_halve(self.requested, limits):
            limits = _halve_batch(self.requested, limits)
            self._explain(
                "batch",
                limits.batch,
                f"a row's states take {self._slot / MIB:,.1f} MiB, and all states at most a third "
                "of the memory that weights leave",
            )
        return limits

    def _fit_one_row(self, limits: Limits, executables: Mapping[str, ExecutableMemory]) -> Limits:
        """Lowers the batch, the chunk and the prompt tokens of a step, in this order, until a row
        of the shortest allowed context fits."""
        requested = self.requested
        value: int | None
        while (pages := self._pages(limits, executables)) < _least_pages(requested, limits):
            if _can_halve(requested, limits):
                limits = _halve_batch(requested, limits)
                name, value = "batch", limits.batch
            elif "prefill_chunk" in requested.unset and _halve_chunk(requested, limits) != limits:
                limits = _halve_chunk(requested, limits)
                name, value = "prefill_chunk", limits.prefill_chunk
            elif _halve_prefill_tokens(requested, limits) != limits:
                limits = _halve_prefill_tokens(requested, limits)
                name, value = "prefill_tokens", limits.prefill_tokens
            else:
                break
            why = f"with more, only {pages:,} pages would be left, fewer than a row needs"
            self._explain(name, value, why)
            if executables:
                break  # the bounds were for larger limits
        return limits

    def _context(self, limits: Limits, executables: Mapping[str, ExecutableMemory]) -> Limits:
        """Lowers the context to what the cache can hold for one row."""
        unset = self.requested.unset
        if "max_model_len" not in unset or self.requested.num_pages:
            return limits
        own, pages = limits.max_model_len, self._pages(limits, executables)
        if pages >= limits.pages_per_row / CONTEXT_SHARE or not pages:
            return limits
        tokens = int(pages * CONTEXT_SHARE) * limits.page_tokens - limits.speculate
        length = max(min(own, tokens // 1024 * 1024), min(own, LEAST_CONTEXT))
        if length == own:
            return limits
        chunk = min(limits.prefill_chunk, length)
        why = (
            f"the model supports {own:,}, and the cache holds about "
            f"{pages * limits.page_tokens:,} tokens"
        )
        self._explain("max_model_len", length, why)
        changed: dict[str, Any] = {"prefill_chunk": chunk} if "prefill_chunk" in unset else {}
        return dataclasses.replace(limits, max_model_len=length, **changed)

    # --- what follows

    def _checkpoints(self, limits: Limits, executables: Mapping[str, ExecutableMemory]) -> Limits:
        """Chooses the number of checkpoint slots, if the model has recurrent states."""
        if "checkpoints" not in self.requested.unset:
            return limits
        kept = 0
        if self._slot and limits.prefix_cache and limits.groups == 1:
            room = self._free_bytes(dataclasses.replace(limits, checkpoints=0), executables)
            kept = min(limits.batch, max(int(room * CHECKPOINTS_SHARE) // self._slot, 0))
            why = (
                "prefix states, at most one per row and an eighth of the memory that weights leave"
            )
            self._explain("checkpoints", kept, why)
        return dataclasses.replace(limits, checkpoints=kept)

    def _choose_utilization(
        self, limits: Limits, executables: Mapping[str, ExecutableMemory]
    ) -> Limits:
        """Chooses the utilization, unless the cache of all rows takes little of the device."""
        if "utilization" not in self.requested.unset:
            return limits
        whole = limits.wanted_pages * page_bytes(self.model.caches)
        if whole <= self._free_bytes(limits, executables) * WHOLE_SHARE:
            why = f"enough for all rows at full length, {whole / MIB:,.1f} MiB"
            self.reasons["utilization"] = f"pages {limits.wanted_pages:,}: {why}"
            return limits
        why = "of the device's memory; the cache gets all that the rest of the plan leaves"
        self._explain("utilization", UTILIZATION, why)
        return dataclasses.replace(limits, utilization=UTILIZATION)

    def _explain_buckets(self, limits: Limits) -> None:
        """Updates the reasons of the buckets to their final values."""
        for name in ("decode_buckets", "prefill_buckets"):
            if name in self.requested.unset and not limits.reproducible:
                what = "rows" if name == "decode_buckets" else "prompt tokens"
                why = f"fewer {what}; {len(all_steps(limits))} executables in all"
                self._explain(name, getattr(limits, name), why)


def _below(buckets: Iterable[int], maximum: int, groups: int = 1) -> tuple[int, ...]:
    return tuple(each for each in buckets if each < maximum and each % groups == 0)


def _least_pages(requested: Limits, limits: Limits) -> int:
    """Returns the pages that one row needs, at the shortest allowed context if it is open."""
    if requested.num_pages:
        return 1
    if "max_model_len" not in requested.unset:
        return limits.pages_per_row
    shortest = min(LEAST_CONTEXT, limits.max_model_len)
    least = dataclasses.replace(limits, max_model_len=shortest).pages_per_row
    return int(-(-least // CONTEXT_SHARE))


def _can_halve(requested: Limits, limits: Limits) -> bool:
    return "batch" in requested.unset and _compute_half_batch(requested, limits) < limits.batch


def _compute_half_batch(requested: Limits, limits: Limits) -> int:
    least = max(*requested.decode_buckets, limits.groups, 1)
    return max(limits.batch // 2 // limits.groups * limits.groups, least)


def _halve_batch(requested: Limits, limits: Limits) -> Limits:
    rows = _compute_half_batch(requested, limits)
    changed: dict[str, Any] = {"batch": rows}
    if "decode_buckets" in requested.unset:
        changed["decode_buckets"] = _below(limits.decode_buckets, rows)
    return dataclasses.replace(limits, **changed)


def _halve_chunk(requested: Limits, limits: Limits) -> Limits:
    """Halves the chunk, and the tokens of a step, if the chunk stays long enough."""
    chunk = max(limits.prefill_chunk // 2, *requested.prefill_buckets, 1)
    if chunk >= limits.prefill_chunk or chunk < LEAST_CHUNK:
        return limits
    changed: dict[str, Any] = {"prefill_chunk": chunk}
    if requested.prefill_tokens is None and limits.prefill_tokens:
        changed["prefill_tokens"] = max(limits.prefill_tokens // 2, chunk)
    if "prefill_buckets" in requested.unset:
        changed["prefill_buckets"] = _below(limits.prefill_buckets, chunk)
    return dataclasses.replace(limits, **changed)


def _halve_prefill_tokens(requested: Limits, limits: Limits) -> Limits:
    """Halves the tokens of a step that packs several prompts, down to one chunk."""
    if requested.prefill_tokens is not None or limits.prefill_tokens is None:
        return limits
    tokens = max(limits.prefill_tokens // 2, limits.prefill_chunk)
    return dataclasses.replace(limits, prefill_tokens=tokens)
