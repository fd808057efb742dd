"""The limits of an engine: batch, lengths, cache and buckets."""

import dataclasses
from typing import Any

from jaxattn.core.cache.formats import CACHE_FORMATS, PAGE_SIZE
from jaxattn.core.validation.arguments import MOST
from jaxattn.core.validation.array_checks import check_sizes, is_integer
from jaxattn.memory.budget import check_utilization

# The decode kernels take so many tokens beside a row's last one.
MOST_DRAFTS = 3
# Decode steps of one call: a row that ends outside of the device's sight is found so much later.
MOST_STEPS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What an engine is compiled and allocated for.

    Attributes:
        batch: rows that decode together, and state slots.
        max_model_len: longest row in tokens, prompt and generated together.
        num_pages: pages of the cache; None is enough for every row at `max_model_len`, or with
            `utilization` what the device holds of that.
        prefill_chunk: prompt tokens that are read at a time, of one request. Beside rows that
            decode a round reads one chunk, so this is what their next token waits for.
        prefill_rows: prompts that may be read together, a chunk of each, where several are due. A
            row's bits may depend on how many are, as other shapes take other matmuls.
        prefix_cache: prompts that begin as earlier ones share their pages, which stay in the cache
            until their room is wanted. A model with recurrent states needs `checkpoints` too.
        checkpoints: slots for states at the ends of prefixes, beside those of rows. A state is as
            large as thousands of tokens, so none is kept unless it is asked for.
        utilization: fraction of the device's total memory, not of what is free, for arrays and
            XLA's temp. The cache gets what the rest of the plan leaves of it. Where other
            processes hold more than the rest, it gets what they leave. None sizes the cache by
            `num_pages` alone.
        decode_buckets: smaller batches that are compiled too: a step takes the smallest that holds
            its rows. A row's bits may depend on the bucket, as other shapes take other matmuls.
        prefill_buckets: smaller chunks that are compiled too, for the last one of a prompt.
        cache_format: what the cache stores, of `jaxattn.core.cache.formats.CACHE_FORMATS`; "auto"
            is the model's own. The parameters are then those of `model.with_cache_format(...)`.
        speculate: tokens that a decode step guesses beside the one that it gives for certain, 0 to
            3 (prompt_lookup.py). What rows say is the same up to rounding; it may come sooner. A
            row with recurrent states takes as many slots more. On one GPU alone.
        steps_per_round: decode steps that one call runs, 1 to 8, where nobody waits for fewer: no
            prompt is being read, and no row has a stop string, a grammar or log-probabilities.
            Tokens come as many at a time, and a request comes in up to two such calls later. None
            lets `prepare` choose (decode_step_count.py): more than one where a step is shorter than
            its host takes. On one GPU alone, and not beside `speculate`.
        spread: over how many GPUs the pages of a row are spread, one of each stripe of pages;
            `prepare` sets it, as `Parallel.context`.
        groups: of GPUs that have as many of the rows each, with pages and slots of their own;
            `prepare` sets it, as `Parallel.data`. `num_pages` are those of a group.
        native_layers: so many first and so many last layers of attention keep the model's own.
        q_lens: tokens per row of the decode executables. `Engine.generate` takes one and never the
            others: they are planned, compiled and warmed for callers of `Engine.executables` who
            append several tokens in a step, which gives the logits after the last of them.

    Raises:
        ValueError: one of them is not a positive integer, or no fraction, or a bucket is larger
            than what it is a part of.
    """

    batch: int = 4
    max_model_len: int = 1024
    num_pages: int | None = None
    prefill_chunk: int = 128
    prefill_rows: int = 1
    prefix_cache: bool = True
    checkpoints: int = 0
    utilization: float | None = None
    decode_buckets: tuple[int, ...] = ()
    prefill_buckets: tuple[int, ...] = ()
    q_lens: tuple[int, ...] = (1,)
    cache_format: str = "auto"
    native_layers: int = 0
    speculate: int = 0
    steps_per_round: int | None = None
    spread: int = 1
    groups: int = 1

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            object.__setattr__(self, name, _plain(value))
        for name in ("decode_buckets", "prefill_buckets", "q_lens"):
            if not isinstance(getattr(self, name), tuple):
                raise TypeError(
                    f"{name} must be several integers, as in (1, 4); got {getattr(self, name)!r}"
                )
        if self.cache_format not in CACHE_FORMATS:
            raise ValueError(
                f"cache_format must be one of {', '.join(CACHE_FORMATS)}; got "
                f"cache_format={self.cache_format!r}"
            )
        check_sizes("Limits", least=0, native_layers=self.native_layers)
        check_sizes("Limits", least=0, checkpoints=self.checkpoints, speculate=self.speculate)
        if self.speculate > MOST_DRAFTS:
            raise ValueError(f"speculate must be at most {MOST_DRAFTS}; got {self.speculate}")
        if self.steps_per_round is not None:
            check_sizes("Limits", steps_per_round=self.steps_per_round)
            if self.steps_per_round > MOST_STEPS:
                raise ValueError(
                    f"steps_per_round must be at most {MOST_STEPS}; got {self.steps_per_round}"
                )
            if self.speculate and self.steps_per_round > 1:
                raise ValueError(
                    f"steps_per_round={self.steps_per_round} runs without drafts, and "
                    f"speculate={self.speculate}; set one of them to its default"
                )
        zero = {"cache_format", "native_layers", "prefix_cache", "checkpoints", "speculate"}
        for name, value in dataclasses.asdict(self).items():
            if name in zero:
                continue
            if value is None and name in ("num_pages", "utilization", "steps_per_round"):
                continue
            if name == "utilization":
                check_utilization(value)
                continue
            for number in value if isinstance(value, tuple) else (value,):
                if not is_integer(number) or number < 1:
                    raise ValueError(f"{name} must be a positive integer; got {number!r}")
                if number > MOST:
                    raise ValueError(f"{name} must be at most {MOST:,}, an int32; got {number:,}")
        if 1 not in self.q_lens:
            raise ValueError(f"q_lens must have 1, the step of serving; got {self.q_lens}")
        for rows in (self.batch, *self.decode_buckets):
            if rows % self.groups:
                raise ValueError(
                    f"batch={self.batch} and decode_buckets={self.decode_buckets} must be "
                    f"multiples of the {self.groups} data groups that share them; {rows} is none"
                )
        for name, whole in (("decode_buckets", "batch"), ("prefill_buckets", "prefill_chunk")):
            if max(getattr(self, name), default=0) > getattr(self, whole):
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at most {whole}={getattr(self, whole)}"
                )

    @property
    def rows_per_group(self) -> int:
        """Rows, and state slots, of a data group."""
        return self.batch // self.groups

    @property
    def page_tokens(self) -> int:
        """Tokens of a page, or of a page on each of the GPUs that share a row's."""
        return PAGE_SIZE * self.spread

    @property
    def step_tokens(self) -> int:
        """Tokens that a row may write, and give, in a decode step."""
        return self.speculate + 1

    @property
    def round_steps(self) -> int:
        """Decode steps of one call, at most."""
        return self.steps_per_round or 1

    @property
    def pages_per_row(self) -> int:
        """Of a row at `max_model_len`, and a draft behind it."""
        return -(-(self.max_model_len + self.speculate) // self.page_tokens)

    @property
    def longest_row(self) -> int:
        """Tokens of a prompt and its answer that fit into the length and into all pages: the last
        one is never written, a draft behind it is."""
        return min(self.max_model_len, self.pages * self.page_tokens - self.speculate + 1)

    @property
    def wanted_pages(self) -> int:
        """Every row at `max_model_len`: more pages would never be used."""
        return self.rows_per_group * self.pages_per_row

    @property
    def pages(self) -> int:
        return self.num_pages or self.wanted_pages

    @property
    def table_width(self) -> int:
        """M: pages of the longest row that the cache can hold, not of the longest imaginable."""
        return min(self.pages_per_row, self.pages)

    @property
    def batches(self) -> tuple[int, ...]:
        """Rows of the decode executables, ascending."""
        return tuple(sorted({*self.decode_buckets, self.batch}))

    @property
    def chunks(self) -> tuple[int, ...]:
        """Tokens of the prefill executables, ascending."""
        longest = min(self.prefill_chunk, self.max_model_len)
        return tuple(sorted({*(min(b, longest) for b in self.prefill_buckets), longest}))


def _plain(value: Any) -> Any:
    """Python's integers and tuples for NumPy's integers and lists, so that equal limits are one."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return int(value) if is_integer(value) else value


def larger_shares(utilization: float | None) -> tuple[float, ...]:
    """The tenths of a device above a given share of it, up to 0.9, which leaves the driver some."""
    if utilization is None:
        return ()
    return tuple(tenths / 10 for tenths in range(1, 10) if tenths / 10 > utilization)
