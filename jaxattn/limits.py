"""The limits of an engine: batch size, lengths, cache size and buckets."""

import dataclasses
from typing import Any

from jaxattn.core.cache.formats import CACHE_FORMATS, PAGE_SIZE
from jaxattn.core.validation.arguments import MOST
from jaxattn.core.validation.array_checks import check_sizes, is_integer
from jaxattn.memory.plan import check_utilization

# The decode kernels take at most this many draft tokens per row, after its last token.
MOST_DRAFTS = 3
DRAFT_SOURCES = ("lookup", "mtp")
# Prompt tokens of a line of a step, which the kernels process as one tile of queries.
LINE_TOKENS = 128
# Decode steps of one call. The host sees an end such as a stop string only after the whole call.
MOST_STEPS = 8


class UnsetInt(int):
    """A small placeholder for a size that the user left out; `choose_limits` replaces it."""


class UnsetTuple(tuple[int, ...]):
    """A placeholder for sizes that the user left out; `choose_limits` replaces it."""


# Limits that compile quickly, for a CPU and until the engine knows its device.
_SMALL: dict[str, Any] = {
    "batch": UnsetInt(4),
    "max_model_len": UnsetInt(1024),
    "prefill_chunk": UnsetInt(128),
    "prefill_rows": UnsetInt(1),
    "checkpoints": UnsetInt(0),
    "decode_buckets": UnsetTuple(),
    "prefill_buckets": UnsetTuple(),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The sizes for which an engine is compiled and allocated.

    If you leave out the following limits or pass None,
    `engine.startup.default_limits.choose_limits` chooses them for the model and its device:
    `batch`, `max_model_len`, `prefill_chunk`, `prefill_rows`, `checkpoints`, `decode_buckets` and
    `prefill_buckets`. Without `num_pages`, `choose_limits` also chooses `utilization`. Until then
    the sizes have small values, and `unset` names the limits. `choose_limits` keeps every given
    value.

    Attributes:
        batch: The number of rows that decode together, and of state slots.
        max_model_len: The maximum length of a row in tokens, prompt and generated together.
        num_pages: The number of pages of the cache. None means enough for every row at
            `max_model_len`, or with `utilization` as many of these as fit on the device.
        prefill_chunk: The maximum number of tokens that a step reads of one prompt.
        prefill_rows: The maximum number of prompts that a step reads from. A row's bits may depend
            on the number that it does read, because other shapes use other matmul kernels.
        prefill_tokens: The maximum number of prompt tokens per step and data group. None means
            `prefill_chunk * prefill_rows` (`prefill_chunk` if `reproducible`), or what
            `choose_limits` chooses if one of the two is left out.
        mixed_tokens: The maximum number of prompt tokens of a mixed step, at least a line. More
            tokens delay the next token of the rows that decode. If all prefill executables are
            larger, one of this size is compiled too. With 0, prefill and decode use separate steps.
            None means the same sizes as other prefill steps, or what `choose_limits` chooses.
        prefix_cache: Whether prompts with a common beginning share pages, which stay cached until
            their memory is needed. A model with recurrent states also needs `checkpoints`.
        checkpoints: The number of checkpoint slots, in addition to the rows' slots. A state is as
            large as the cache of thousands of tokens, so the default is to keep none.
        utilization: The fraction of the device's total memory, not of its free memory, for arrays
            and XLA's temp. The cache gets what the other items of the plan leave, or less if other
            processes hold more than the remaining fraction. With `num_pages`, None means that
            `num_pages` sets the cache's size.
        decode_buckets: Smaller batch sizes that are also compiled. A step uses the smallest that
            holds its rows. A row's bits may depend on the bucket, because other shapes use other
            matmul kernels.
        prefill_buckets: Smaller numbers of prompt tokens per step that are also compiled, rounded
            up to whole lines of `line_tokens`.
        cache_format: The format of the cache, from `jaxattn.core.cache.formats.CACHE_FORMATS`;
            "auto" means the model's own. The parameters must then be those of
            `model.with_cache_format(...)`.
        speculate: The number of draft tokens that a decode step verifies per row, 0 to 3
            (engine/steps/speculation/). The output is the same up to rounding, and may come
            sooner. A row with recurrent states needs this many more slots. Only on one GPU.
        speculate_by: The source of the drafts. "lookup" copies the tokens that followed an earlier
            occurrence of the row's last tokens. "mtp" uses the model's draft head (draft_head.py),
            for which `load` needs `draft_head=True`. The head costs time, so each bucket of rows
            stops using it where decoding without it is faster.
        steps_per_round: The maximum number of decode steps per call, 1 to 8. The engine runs
            several only while no prompt is being read and no row has a stop string, a grammar or
            log-probabilities. The tokens of a call arrive together, and a new request waits for up
            to two calls. None lets `prepare` choose (decode_step_count.py): more than one if a step
            is shorter than the host's work for it. Only on one GPU, and not with `speculate`.
        reproducible: Exact mode. The bits of a row's log-probabilities do not depend on other rows
            or on preemption, and `Engine.score` returns the same bits. Prefill steps read whole
            chunks, all have one size, and no row decodes in them. One executable decodes all rows,
            without buckets, fused steps or drafts, and split-KV depends only on the row's own
            length. A preempted row replays the tokens that it had generated.
        reserved_bytes: The bytes of each device that the plan leaves to other users in the process,
            such as a trainer's optimizer. The plan already counts arrays that exist before the
            engine.
        spread: The number of GPUs over which the pages of a row are distributed. Each GPU has one
            page of every stripe of `spread` consecutive pages. `prepare` sets it, from
            `Parallel.context`.
        groups: The number of data groups. Each group has an equal share of the rows, and its own
            pages and slots; `num_pages` is per group. `prepare` sets it, from `Parallel.data`.
        native_layers: The number of attention layers at each end of the model that keep the model's
            own cache format.
        q_lens: The tokens per row for which decode executables are compiled. `Engine.generate` uses
            only 1. Others are planned, compiled and warmed up for callers of `Engine.executables`
            that append several tokens in a step, and get the logits after the last one.

    Raises:
        TypeError: `decode_buckets`, `prefill_buckets` or `q_lens` is not a tuple or list.
        ValueError: A size is not a positive integer, a fraction is not in (0, 1], a bucket is
            larger than the size that it divides, or limits contradict each other.
    """

    batch: int = _SMALL["batch"]
    max_model_len: int = _SMALL["max_model_len"]
    num_pages: int | None = None
    prefill_chunk: int = _SMALL["prefill_chunk"]
    prefill_rows: int = _SMALL["prefill_rows"]
    prefill_tokens: int | None = None
    mixed_tokens: int | None = None
    prefix_cache: bool = True
    checkpoints: int = _SMALL["checkpoints"]
    utilization: float | None = None
    decode_buckets: tuple[int, ...] = _SMALL["decode_buckets"]
    prefill_buckets: tuple[int, ...] = _SMALL["prefill_buckets"]
    q_lens: tuple[int, ...] = (1,)
    cache_format: str = "auto"
    native_layers: int = 0
    speculate: int = 0
    speculate_by: str = "lookup"
    steps_per_round: int | None = None
    reproducible: bool = False
    reserved_bytes: int = 0
    spread: int = 1
    groups: int = 1

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            unset_value = _SMALL.get(name) if value is None else None
            object.__setattr__(self, name, _plain(value) if unset_value is None else unset_value)
        if isinstance(self.batch, UnsetInt) and is_integer(self.groups) and self.groups > 1:
            rounded_batch = -(-self.batch // self.groups) * self.groups
            object.__setattr__(self, "batch", UnsetInt(rounded_batch))
        for name in ("decode_buckets", "prefill_buckets", "q_lens"):
            if not isinstance(getattr(self, name), tuple):
                raise TypeError(
                    f"{name} must be a tuple of integers such as (1, 4); got "
                    f"{getattr(self, name)!r}"
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
        if self.speculate_by not in DRAFT_SOURCES:
            raise ValueError(
                f"speculate_by must be one of {', '.join(DRAFT_SOURCES)}; got "
                f"speculate_by={self.speculate_by!r}"
            )
        if self.speculate_by == "mtp" and not self.speculate:
            raise ValueError(
                f"speculate_by={self.speculate_by!r} needs speculate from 1 to {MOST_DRAFTS}; got "
                f"speculate={self.speculate}"
            )
        if self.steps_per_round is not None:
            check_sizes("Limits", steps_per_round=self.steps_per_round)
            if self.steps_per_round > MOST_STEPS:
                raise ValueError(
                    f"steps_per_round must be at most {MOST_STEPS}; got {self.steps_per_round}"
                )
            if self.speculate and self.steps_per_round > 1:
                raise ValueError(
                    f"steps_per_round={self.steps_per_round} runs without drafts, but "
                    f"speculate={self.speculate}; leave one of them out"
                )
        checked_separately = {
            "cache_format",
            "native_layers",
            "prefix_cache",
            "checkpoints",
            "speculate",
        }
        checked_separately |= {"speculate_by", "reproducible", "mixed_tokens", "reserved_bytes"}
        for name, value in dataclasses.asdict(self).items():
            if name in checked_separately:
                continue
            if value is None and name in _OPTIONAL:
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
            raise ValueError(f"q_lens must contain 1, which serving needs; got {self.q_lens}")
        for rows in (self.batch, *self.decode_buckets):
            if rows % self.groups:
                raise ValueError(
                    f"batch={self.batch} and decode_buckets={self.decode_buckets} must be "
                    f"multiples of the {self.groups} data groups; {rows} is not"
                )
        for name, upper_name in (("decode_buckets", "batch"), ("prefill_buckets", "prefill_chunk")):
            if isinstance(getattr(self, upper_name), UnsetInt):
                continue  # `choose_limits` chooses a value that is large enough
            if max(getattr(self, name), default=0) > getattr(self, upper_name):
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at most "
                    f"{upper_name}={getattr(self, upper_name)}"
                )
        if self.mixed_tokens is not None:
            check_sizes("Limits", least=0, mixed_tokens=self.mixed_tokens)
        if not is_integer(self.reserved_bytes) or self.reserved_bytes < 0:
            raise ValueError(
                f"reserved_bytes must be an integer of at least 0; got {self.reserved_bytes!r}"
            )
        self._check_reproducible()

    def _check_reproducible(self) -> None:
        """Raises ValueError for limits under which a row's bits would depend on other rows."""
        if not isinstance(self.reproducible, bool):
            raise ValueError(f"reproducible must be True or False; got {self.reproducible!r}")
        if not self.reproducible:
            return
        if self.mixed_tokens:
            raise ValueError(
                f"mixed_tokens={self.mixed_tokens} processes prompts in steps that also decode "
                "other rows, which reproducible=True does not allow; leave one of them out"
            )
        if self.speculate:
            raise ValueError(
                f"speculate={self.speculate} decodes several tokens per step, but "
                "reproducible=True decodes one; leave one of them out"
            )
        if self.round_steps > 1:
            raise ValueError(
                f"steps_per_round={self.steps_per_round} runs several decode steps per round, but "
                "reproducible=True runs one; leave one of them out"
            )
        for name in ("decode_buckets", "prefill_buckets"):
            if value := getattr(self, name):
                raise ValueError(
                    f"{name}={value} adds shapes, but reproducible=True uses only one; leave one "
                    "of them out"
                )

    @property
    def unset(self) -> frozenset[str]:
        """The names of the limits that `choose_limits` chooses."""
        found = {name for name in _SMALL if isinstance(getattr(self, name), UnsetInt | UnsetTuple)}
        if self.utilization is None and self.num_pages is None:
            found.add("utilization")
        return frozenset(found)

    @property
    def rows_per_group(self) -> int:
        """The number of rows, and of state slots, of a data group."""
        return self.batch // self.groups

    @property
    def page_tokens(self) -> int:
        """Tokens per page; with context parallelism, per stripe of one page on each GPU."""
        return PAGE_SIZE * self.spread

    @property
    def uses_draft_head(self) -> bool:
        """Whether the model's own draft head guesses the draft tokens."""
        return self.speculate > 0 and self.speculate_by == "mtp"

    @property
    def step_tokens(self) -> int:
        """The maximum number of tokens that a row writes, and returns, in a decode step."""
        return self.speculate + 1

    @property
    def round_steps(self) -> int:
        """The maximum number of decode steps of one call."""
        return self.steps_per_round or 1

    @property
    def pages_per_row(self) -> int:
        """Pages for a row at `max_model_len`, and the draft after it."""
        return -(-(self.max_model_len + self.speculate) // self.page_tokens)

    @property
    def longest_row(self) -> int:
        """The maximum number of tokens of a prompt and its answer, which `max_model_len` and the
        number of pages limit. The cache never holds a row's last token, but it holds a draft after
        that token."""
        return min(self.max_model_len, self.pages * self.page_tokens - self.speculate + 1)

    @property
    def wanted_pages(self) -> int:
        """Pages for every row at `max_model_len`; no more would ever be used."""
        return self.rows_per_group * self.pages_per_row

    @property
    def pages(self) -> int:
        return self.num_pages or self.wanted_pages

    @property
    def table_width(self) -> int:
        """The block table's width M: pages of the longest row that the cache can hold."""
        return min(self.pages_per_row, self.pages)

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes of the decode executables, ascending."""
        return tuple(sorted({*self.decode_buckets, self.batch}))

    @property
    def chunks(self) -> tuple[int, ...]:
        """Tokens that prefill executables read of one row, ascending."""
        chunk_tokens = min(self.prefill_chunk, self.max_model_len)
        return tuple(sorted({*(min(b, chunk_tokens) for b in self.prefill_buckets), chunk_tokens}))

    @property
    def line_tokens(self) -> int:
        """Tokens of a line: a step pads each piece of a prompt to a multiple of it."""
        return min(LINE_TOKENS, self.chunks[-1])

    @property
    def prompt_rows(self) -> int:
        """The maximum number of prompts of a data group that a step reads from."""
        return max(min(self.prefill_rows, self.batch) // self.groups, 1)

    @property
    def prefill_sizes(self) -> tuple[int, ...]:
        """Prompt tokens per data group of the prefill executables, ascending, in whole lines."""
        chunk_tokens, line = self.chunks[-1], self.line_tokens
        all_rows_tokens = self.prompt_rows * chunk_tokens
        max_tokens = self.prefill_tokens or (chunk_tokens if self.reproducible else all_rows_tokens)
        max_tokens = max(min(max_tokens, all_rows_tokens), chunk_tokens)
        # In exact mode only one size is compiled, with room for whole chunks of several prompts.
        several = () if self.reproducible else self.chunks
        sizes = {-(-size // line) * line for size in (*several, max_tokens)}
        if self.mixed_tokens and self.mixes and self.mixed_tokens < min(sizes):
            sizes.add(max(self.mixed_tokens // line, 1) * line)
        return tuple(sorted(sizes))

    @property
    def mixes(self) -> bool:
        """Whether a step may read prompts while other rows decode in it. In exact mode it may not,
        because a row's results would depend on the prompts."""
        return self.mixed_tokens != 0 and not self.reproducible

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """The sizes among `prefill_sizes` that a mixed step may have."""
        sizes = self.prefill_sizes
        max_tokens = self.mixed_tokens or sizes[-1]
        return tuple(size for size in sizes if size <= max_tokens) or sizes[:1]


# Limits that may stay None: the pages imply them, or `choose_limits` or `prepare` sets them.
_OPTIONAL = ("num_pages", "utilization", "steps_per_round", "prefill_tokens", "mixed_tokens")


def _plain(value: Any) -> Any:
    """Converts NumPy integers and lists to Python's, so that equal limits compare equal."""
    if isinstance(value, UnsetInt | UnsetTuple):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return int(value) if is_integer(value) else value


def larger_shares(utilization: float | None) -> tuple[float, ...]:
    """Returns the tenths above a given utilization, up to 0.9, which leaves room for the driver."""
    if utilization is None:
        return ()
    return tuple(tenths / 10 for tenths in range(1, 10) if tenths / 10 > utilization)
