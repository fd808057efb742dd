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
    """What an engine is compiled and allocated for.

    `batch`, `max_model_len`, `prefill_chunk`, `prefill_rows`, `checkpoints`, `decode_buckets`,
    `prefill_buckets` and, without `num_pages`, `utilization` are chosen for the model and its
    device where they are left out or None (`engine.startup.default_limits.choose_limits`). Until
    then they read as small values, which `unset` names. What is given is never changed.

    Attributes:
        batch: rows that decode together, and state slots.
        max_model_len: longest row in tokens, prompt and generated together.
        num_pages: pages of the cache; None is enough for every row at `max_model_len`, or with
            `utilization` what the device holds of that.
        prefill_chunk: prompt tokens that a step reads of one request, at most.
        prefill_rows: prompts that a step may read of. A row's bits may depend on how many it does,
            as other shapes take other matmuls.
        prefill_tokens: prompt tokens of a step, of a data group, at most. None is `prefill_chunk`
            of each of `prefill_rows` (of one if `reproducible`), or what `choose_limits` chooses
            where one of the two is left out.
        mixed_tokens: prompt tokens of a step in which other rows decode, at most, and a line at
            least: their next token waits for these. Where all other steps have more, one of as many
            is compiled too. 0 decodes and reads prompts in steps of their own. None is as many as
            without such rows, or what `choose_limits` chooses.
        prefix_cache: prompts that begin as earlier ones share their pages, which stay in the cache
            until their room is wanted. A model with recurrent states needs `checkpoints` too.
        checkpoints: slots for states at the ends of prefixes, beside those of rows. A state is as
            large as thousands of tokens, so none is kept unless it is asked for.
        utilization: fraction of the device's total memory, not of what is free, for arrays and
            XLA's temp. The cache gets what the rest of the plan leaves of it. Where other
            processes hold more than the rest, it gets what they leave. With `num_pages` and None
            the pages alone size the cache.
        decode_buckets: smaller batches that are compiled too: a step takes the smallest that holds
            its rows. A row's bits may depend on the bucket, as other shapes take other matmuls.
        prefill_buckets: fewer prompt tokens of a step that are compiled too, in whole lines of
            `line_tokens`.
        cache_format: what the cache stores, of `jaxattn.core.cache.formats.CACHE_FORMATS`; "auto"
            is the model's own. The parameters are then those of `model.with_cache_format(...)`.
        speculate: tokens that a decode step guesses beside the one that it gives for certain, 0 to
            3 (engine/steps/speculation/). What rows say is the same up to rounding; it may come
            sooner. A row with recurrent states takes as many slots more. On one GPU alone.
        speculate_by: "lookup" guesses what followed the row's last tokens before; "mtp" asks the
            model's own draft head (draft_head.py), and `load` must read that: `draft_head=True`.
            Guesses of a head cost time, so each bucket of rows goes without where that is faster.
        steps_per_round: decode steps that one call runs, 1 to 8, where nobody waits for fewer: no
            prompt is being read, and no row has a stop string, a grammar or log-probabilities.
            Tokens come as many at a time, and a request comes in up to two such calls later. None
            lets `prepare` choose (decode_step_count.py): more than one where a step is shorter than
            its host takes. On one GPU alone, and not beside `speculate`.
        reproducible: exact mode. A row's log-probabilities have the same bits whatever rows are
            beside it and whether it lost its pages, and `Engine.score` finds the same bits again.
            Prompts are read by whole chunks, in steps in which no row decodes, all of one size. One
            executable decodes all rows, without buckets, several steps or drafts, and attention
            cuts rows by their own length. A row that lost its pages decodes again what it had said.
        reserved_bytes: of each device, that the plan leaves to others in the process, such as a
            trainer's optimizer. Arrays that are there before the engine count without it.
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
        """Names of what `choose_limits` chooses: what nobody fixed."""
        found = {name for name in _SMALL if isinstance(getattr(self, name), UnsetInt | UnsetTuple)}
        if self.utilization is None and self.num_pages is None:
            found.add("utilization")
        return frozenset(found)

    @property
    def rows_per_group(self) -> int:
        """Rows, and state slots, of a data group."""
        return self.batch // self.groups

    @property
    def page_tokens(self) -> int:
        """Tokens of a page, or of a page on each of the GPUs that share a row's."""
        return PAGE_SIZE * self.spread

    @property
    def uses_draft_head(self) -> bool:
        """Whether the model's own draft head guesses tokens."""
        return self.speculate > 0 and self.speculate_by == "mtp"

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
        """Tokens of a row in the prefill executables, ascending."""
        longest = min(self.prefill_chunk, self.max_model_len)
        return tuple(sorted({*(min(b, longest) for b in self.prefill_buckets), longest}))

    @property
    def line_tokens(self) -> int:
        """Tokens that a prompt's piece is padded to a multiple of in a step."""
        return min(LINE_TOKENS, self.chunks[-1])

    @property
    def prompt_rows(self) -> int:
        """Prompts of a data group that a step may read of."""
        return max(min(self.prefill_rows, self.batch) // self.groups, 1)

    @property
    def prefill_sizes(self) -> tuple[int, ...]:
        """Prompt tokens of the prefill executables, of a data group, ascending, in whole lines."""
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
        """Whether a step may read prompts while other rows decode in it. A reproducible one does
        not: what a row computes would depend on the prompts."""
        return self.mixed_tokens != 0 and not self.reproducible

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """Those of `prefill_sizes` that a step with rows that decode may have."""
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
