"""The limits of an engine: batch, lengths, cache and buckets."""

import dataclasses
from typing import Any

from jaxattn.core.cache.formats import CACHE_FORMATS, PAGE_SIZE
from jaxattn.core.validation.arguments import MOST
from jaxattn.core.validation.array_checks import check_sizes, is_integer
from jaxattn.memory.plan import check_utilization

# The decode kernels take so many tokens beside a row's last one.
MOST_DRAFTS = 3
DRAFT_SOURCES = ("lookup", "mtp")
# Prompt tokens of a line of a step: the queries that kernels take together.
LINE_TOKENS = 128
# Decode steps of one call: a row that ends outside of the device's sight is found so much later.
MOST_STEPS = 8


class UnsetInt(int):
    """A small size that stands for one that nobody fixed, until `choose_limits` chooses it."""


class UnsetTuple(tuple[int, ...]):
    """Sizes that stand for those that nobody fixed, until `choose_limits` chooses them."""


# What an engine has that is quick to compile: on a CPU, and before its device is known.
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
    """The sizes for which an engine compiles its steps and allocates memory.

    The engine chooses `batch`, `max_model_len`, `prefill_chunk`, `prefill_rows`, `checkpoints`,
    `decode_buckets`, `prefill_buckets` and, without `num_pages`, `utilization` for the model and
    its device, if they are omitted or None (`engine.startup.default_limits.choose_limits`). Before
    that, these attributes have small values, and `unset` lists their names. The engine never
    changes a limit that you set.

    Attributes:
        batch: the number of rows that decode together, and of state slots.
        max_model_len: the longest row in tokens, including prompt and generated tokens.
        num_pages: pages of the cache. None is enough for every row at `max_model_len`, or with
            `utilization` as many of these pages as the device has room for.
        prefill_chunk: the largest number of prompt tokens that a step reads of one request.
        prefill_rows: the largest number of prompts that a step reads. A row's bits may depend on
            this number, because other shapes use other matmuls.
        prefill_tokens: the largest number of prompt tokens of a step, per data group. None is
            `prefill_chunk` times `prefill_rows` (`prefill_chunk` if `reproducible`), or the choice
            of `choose_limits` if one of the two limits is unset.
        mixed_tokens: the largest number of prompt tokens in a step that also decodes rows, at least
            one line. The next tokens of these rows wait for the prompt tokens. If all other steps
            are larger, the engine also compiles a step of this size. With 0, prompts and decoded
            rows have separate steps. None is the limit of steps without such rows, or the choice of
            `choose_limits`.
        prefix_cache: whether prompts that begin with the same tokens share pages. The pages stay in
            the cache until their memory is needed. A model with recurrent states also needs
            `checkpoints`.
        checkpoints: slots for states at the ends of prefixes, in addition to the slots of rows. A
            state is as large as the cache of thousands of tokens, so the engine stores none by
            default.
        utilization: the fraction of the device's total memory (not of its free memory) for arrays
            and XLA's temp. The cache gets the memory that the rest of the plan leaves. If other
            processes hold more than the remaining fraction, the cache gets what they leave. With
            `num_pages` and None, only the pages determine the size of the cache.
        decode_buckets: smaller batch sizes that the engine also compiles. A step uses the smallest
            bucket that holds its rows. A row's bits may depend on the bucket, because other shapes
            use other matmuls.
        prefill_buckets: smaller numbers of prompt tokens that the engine also compiles, in whole
            lines of `line_tokens`.
        cache_format: the format of the cache, one of `jaxattn.core.cache.formats.CACHE_FORMATS`;
            "auto" is the model's own. The parameters must be those of
            `model.with_cache_format(...)`.
        speculate: the number of tokens that a decode step drafts in addition to the certain token,
            0 to 3 (engine/steps/speculation/). The results are the same up to rounding, and may
            arrive sooner. A row with recurrent states needs this number of additional slots. Only
            on one GPU.
        speculate_by: "lookup" drafts the tokens that followed the row's last tokens before. "mtp"
            uses the model's own draft head (draft_head.py), for which `load` needs
            `draft_head=True`. Drafts of a head cost time, so each bucket of rows omits them if it
            is faster without drafts.
        steps_per_round: the number of decode steps per call, 1 to 8. The engine uses fewer steps
            while it reads a prompt, or if a row has a stop string, a grammar or log-probabilities.
            The tokens of a call arrive together, and a new request starts up to two such calls
            later. With None, `prepare` chooses (decode_step_count.py): more than one if a step is
            shorter than its host work. Only on one GPU, and not with `speculate`.
        reproducible: exact mode. A row's log-probabilities have the same bits next to any other
            rows and after preemption, and `Engine.score` computes the same bits again. Prompts are
            read in whole chunks of one size, in steps that decode no row. One executable decodes
            all rows, without buckets, several steps or drafts, and attention splits a row only by
            the row's own length. A preempted row decodes its tokens again.
        reserved_bytes: bytes of each device that the plan reserves for others in the process, such
            as a trainer's optimizer. The plan counts arrays that already exist in any case, so do
            not include them.
        spread: the number of GPUs that share the pages of a row, one of each stripe of pages;
            `prepare` sets this to `Parallel.context`.
        groups: the number of data groups, each with its own rows, pages and slots; `prepare` sets
            this to `Parallel.data`. `num_pages` is the number of pages of one group.
        native_layers: this number of first and of last attention layers keep the model's own cache
            format.
        q_lens: tokens per row of the decode executables. `Engine.generate` uses only 1. The engine
            also plans, compiles and warms up the other lengths, for callers of `Engine.executables`
            that append several tokens in a step. Such a step returns the logits after the last
            token.

    Raises:
        ValueError: a limit is not a positive integer or not a fraction, or a bucket is larger than
            the limit that it belongs to.
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
            small = _SMALL.get(name) if value is None else None
            object.__setattr__(self, name, _plain(value) if small is None else small)
        if isinstance(self.batch, UnsetInt) and is_integer(self.groups) and self.groups > 1:
            shared = -(-self.batch // self.groups) * self.groups
            object.__setattr__(self, "batch", UnsetInt(shared))
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
        if self.speculate_by not in DRAFT_SOURCES:
            raise ValueError(
                f"speculate_by must be one of {', '.join(DRAFT_SOURCES)}; got "
                f"speculate_by={self.speculate_by!r}"
            )
        if self.speculate_by == "mtp" and not self.speculate:
            raise ValueError(
                f"speculate_by={self.speculate_by!r} guesses speculate={self.speculate} tokens; "
                f"give speculate too, from 1 to {MOST_DRAFTS}"
            )
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
        zero |= {"speculate_by", "reproducible", "mixed_tokens", "reserved_bytes"}
        for name, value in dataclasses.asdict(self).items():
            if name in zero:
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
            raise ValueError(f"q_lens must have 1, the step of serving; got {self.q_lens}")
        for rows in (self.batch, *self.decode_buckets):
            if rows % self.groups:
                raise ValueError(
                    f"batch={self.batch} and decode_buckets={self.decode_buckets} must be "
                    f"multiples of the {self.groups} data groups that share them; {rows} is none"
                )
        for name, whole in (("decode_buckets", "batch"), ("prefill_buckets", "prefill_chunk")):
            if isinstance(getattr(self, whole), UnsetInt):
                continue  # which is chosen as large
            if max(getattr(self, name), default=0) > getattr(self, whole):
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at most {whole}={getattr(self, whole)}"
                )
        if self.mixed_tokens is not None:
            check_sizes("Limits", least=0, mixed_tokens=self.mixed_tokens)
        if not is_integer(self.reserved_bytes) or self.reserved_bytes < 0:
            raise ValueError(
                f"reserved_bytes must be an integer of at least 0; got {self.reserved_bytes!r}"
            )
        self._check_reproducible()

    def _check_reproducible(self) -> None:
        """Raises ValueError for a limit under which a row's bits depend on other rows."""
        if not isinstance(self.reproducible, bool):
            raise ValueError(f"reproducible must be True or False; got {self.reproducible!r}")
        if not self.reproducible:
            return
        if self.mixed_tokens:
            raise ValueError(
                f"mixed_tokens={self.mixed_tokens} reads prompts beside rows that decode, and "
                "reproducible=True does not; leave one of them out"
            )
        if self.speculate:
            raise ValueError(
                f"speculate={self.speculate} decodes as many tokens as a batch may guess, and "
                "reproducible=True one; leave one of them out"
            )
        if self.round_steps > 1:
            raise ValueError(
                f"steps_per_round={self.steps_per_round} has executables of its own for several "
                "steps, and reproducible=True decodes by one; leave one of them out"
            )
        for name in ("decode_buckets", "prefill_buckets"):
            if value := getattr(self, name):
                raise ValueError(
                    f"{name}={value} are several shapes, and reproducible=True has one; leave one "
                    "of them out"
                )

    @property
    def unset(self) -> frozenset[str]:
        """Names of the limits that are not set, which `choose_limits` chooses."""
        found = {name for name in _SMALL if isinstance(getattr(self, name), UnsetInt | UnsetTuple)}
        if self.utilization is None and self.num_pages is None:
            found.add("utilization")
        return frozenset(found)

    @property
    def rows_per_group(self) -> int:
        """Rows and state slots of one data group."""
        return self.batch // self.groups

    @property
    def page_tokens(self) -> int:
        """Tokens of a page; if several GPUs share a row, tokens of one page on each GPU."""
        return PAGE_SIZE * self.spread

    @property
    def uses_draft_head(self) -> bool:
        """Whether the model's own draft head guesses tokens."""
        return self.speculate > 0 and self.speculate_by == "mtp"

    @property
    def step_tokens(self) -> int:
        """The largest number of tokens that a decode step writes and returns per row."""
        return self.speculate + 1

    @property
    def round_steps(self) -> int:
        """The largest number of decode steps per call."""
        return self.steps_per_round or 1

    @property
    def pages_per_row(self) -> int:
        """Pages of a row at `max_model_len`, including a draft."""
        return -(-(self.max_model_len + self.speculate) // self.page_tokens)

    @property
    def longest_row(self) -> int:
        """The largest number of tokens of a prompt and its answer that fit into the length and all
        pages.

        The last token is never written, but a draft after it is.
        """
        return min(self.max_model_len, self.pages * self.page_tokens - self.speculate + 1)

    @property
    def wanted_pages(self) -> int:
        """Pages of all rows at `max_model_len`; no engine uses more pages."""
        return self.rows_per_group * self.pages_per_row

    @property
    def pages(self) -> int:
        return self.num_pages or self.wanted_pages

    @property
    def table_width(self) -> int:
        """M: pages of the longest row for which the cache has room."""
        return min(self.pages_per_row, self.pages)

    @property
    def batches(self) -> tuple[int, ...]:
        """Rows of the decode executables, ascending."""
        return tuple(sorted({*self.decode_buckets, self.batch}))

    @property
    def chunks(self) -> tuple[int, ...]:
        """Tokens of a row in the prefill executables, ascending."""
        longest = min(self.prefill_chunk, self.max_model_len)
        return tuple(sorted({*(min(b, longest) for b in self.prefill_buckets), longest}))

    @property
    def line_tokens(self) -> int:
        """A step pads each piece of a prompt to a multiple of this number of tokens."""
        return min(LINE_TOKENS, self.chunks[-1])

    @property
    def prompt_rows(self) -> int:
        """The largest number of prompts per data group that a step reads."""
        return max(min(self.prefill_rows, self.batch) // self.groups, 1)

    @property
    def prefill_sizes(self) -> tuple[int, ...]:
        """Prompt tokens of the prefill executables, per data group, ascending, in whole lines."""
        longest, line = self.chunks[-1], self.line_tokens
        whole = self.prompt_rows * longest
        most = self.prefill_tokens or (longest if self.reproducible else whole)
        most = max(min(most, whole), longest)
        # One shape that is reproducible, in which whole chunks of several prompts may be.
        several = () if self.reproducible else self.chunks
        sizes = {-(-size // line) * line for size in (*several, most)}
        if self.mixed_tokens and self.mixes and self.mixed_tokens < min(sizes):
            sizes.add(max(self.mixed_tokens // line, 1) * line)
        return tuple(sorted(sizes))

    @property
    def mixes(self) -> bool:
        """Whether a step may read prompts while other rows decode.

        A reproducible engine has no such steps, because a row's bits would depend on the prompts.
        """
        return self.mixed_tokens != 0 and not self.reproducible

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """Those of `prefill_sizes` that a step with decoding rows may have."""
        sizes = self.prefill_sizes
        most = self.mixed_tokens or sizes[-1]
        return tuple(size for size in sizes if size <= most) or sizes[:1]


# What may stay None: the pages say it, or `choose_limits` and `prepare` do.
_OPTIONAL = ("num_pages", "utilization", "steps_per_round", "prefill_tokens", "mixed_tokens")


def _plain(value: Any) -> Any:
    """Python's integers and tuples for NumPy's integers and lists, so that equal limits are one."""
    if isinstance(value, UnsetInt | UnsetTuple):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return int(value) if is_integer(value) else value


def larger_shares(utilization: float | None) -> tuple[float, ...]:
    """The tenths of a device above a given share of it, up to 0.9, which leaves the driver some."""
    if utilization is None:
        return ()
    return tuple(tenths / 10 for tenths in range(1, 10) if tenths / 10 > utilization)
