"""Prometheus metrics of the server, under vLLM's names where vLLM has the metric.

All times use one clock, from a request's arrival to the step that generated a token. A scrape
reads the snapshot of the last step, and never waits for the device thread.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxattn.engine.requests.outputs import Completion, FinishReason
from jaxattn.limits import Limits
from jaxattn.memory.plan import MemoryPlan
from jaxattn.server.runtime.engine_worker import EngineSnapshot, StepReport
from jaxattn.server.runtime.weighted_histogram import WeightedHistogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Upper bounds of histogram buckets, in seconds.
FIRST_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
BETWEEN_TOKENS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0),
)
WHOLE = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0),
)
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
    FinishReason.INTERRUPTED: "abort",
}


@dataclasses.dataclass(slots=True)
class RequestTimestamps:
    """The times of one request's arrival, first token and latest token.

    Attributes:
        arrived, first_token, last_token: `time.perf_counter()` at these events; None before the
            first token.
        prompt: The number of prompt tokens.
    """

    arrived: float
    prompt: int
    first_token: float | None = None
    last_token: float | None = None


@dataclasses.dataclass
class MetricTotals:
    """Sums since the start, for the page."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_tokens: int = 0
    first_token_seconds: float = 0.0
    later_tokens: int = 0
    later_token_seconds: float = 0.0


class ServerMetrics:
    """The metrics of one server.

    Args:
        model: The value of the label `model_name`.

    Attributes:
        snapshot: The engine's counts after its latest step.
        totals: The sums since the start, for the page.
    """

    def __init__(self, model: str):
        self.model, self.registry = model, CollectorRegistry()
        self.snapshot, self.totals = EngineSnapshot(), MetricTotals()
        self._limits: Limits | None = None
        self._plan: MemoryPlan | None = None
        self._rows: dict[int, RequestTimestamps] = {}
        self.registry.register(_Gauges(self))
        self._prompt_tokens = self._counter(
            "vllm:prompt_tokens", "Number of prompt tokens processed."
        )
        self._generated = self._counter("vllm:generation_tokens", "Number of tokens generated.")
        self._disconnected = self._counter(
            "jaxattn:requests_left",
            "Number of requests whose client disconnected before the answer was complete.",
        )
        self._success = Counter(
            "vllm:request_success",
            "Number of finished requests, by the reason for the end.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._rejected = Counter(
            "jaxattn:requests_refused",
            "Number of rejected requests, by HTTP status.",
            ("model_name", "status"),
            registry=self.registry,
        )
        self._time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds",
            "Seconds from arrival to the first token.",
            FIRST_TOKEN,
        )
        self._inter_token_latency = WeightedHistogram(
            "vllm:inter_token_latency_seconds",
            "Seconds between two tokens of a row.",
            model,
            BETWEEN_TOKENS,
        )
        self.registry.register(self._inter_token_latency)
        self._e2e_latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "Seconds from arrival to the last token.", WHOLE
        )
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds",
            "Seconds from arrival until the request gets a row of the batch.",
            WHOLE,
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds",
            "Seconds from getting a row to the first token.",
            WHOLE,
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "Seconds from the first to the last token.", WHOLE
        )
        self._request_prompt = self._histogram(
            "vllm:request_prompt_tokens", "Number of prompt tokens of a request.", TOKENS
        )
        self._request_generated = self._histogram(
            "vllm:request_generation_tokens", "Number of tokens generated for a request.", TOKENS
        )
        self._max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "The max_tokens of a request.", TOKENS
        )
        self._n = self._histogram("vllm:request_params_n", "The n of a request.", CHOICES)
        self._iteration = self._histogram(
            "vllm:iteration_tokens_total", "Number of tokens that one step generated.", TOKENS
        )
        self._step = self._histogram(
            "jaxattn:step_seconds", "Seconds of one step of the engine.", BETWEEN_TOKENS
        )

    def _counter(self, name: str, documentation: str) -> Counter:
        return Counter(name, documentation, ("model_name",), registry=self.registry).labels(
            self.model
        )

    def _histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(
            name, documentation, ("model_name",), buckets=buckets, registry=self.registry
        )
        return made.labels(self.model)

    @property
    def waiting(self) -> int:
        """The number of requests without a row."""
        return max(0, len(self._rows) - self.snapshot.rows)

    def ready(self, limits: Limits, plan: MemoryPlan) -> None:
        """Sets the limits and the memory plan of the engine that has started."""
        self._limits, self._plan = limits, plan

    @property
    def limits(self) -> Limits | None:
        return self._limits

    @property
    def plan(self) -> MemoryPlan | None:
        return self._plan

    def asked(
        self, ids: Sequence[int], prompts: Sequence[int], max_tokens: int, arrived: float
    ) -> None:
        """Records an HTTP request that was queued.

        Args:
            ids: The ids of its engine requests, one per choice.
            prompts: The number of prompt tokens of each.
            max_tokens: The largest `max_tokens` of them.
            arrived: The time of arrival, as `time.perf_counter()`.
        """
        self._n.observe(len(ids))
        self._max_tokens.observe(max_tokens)
        for id, prompt in zip(ids, prompts, strict=True):
            self._rows[id] = RequestTimestamps(arrived, prompt)

    def stepped(self, report: StepReport, tokens: int) -> None:
        """Records a step and the number of tokens that it generated."""
        self.snapshot = report.snapshot
        self.totals.generated_tokens += tokens
        self._generated.inc(tokens)
        self._step.observe(report.seconds)
        self._iteration.observe(tokens)

    def tokens(self, id: int, count: int, now: float) -> None:
        """Records `count` new tokens of a row. The time since its last token is divided equally."""
        times = self._rows[id]
        if times.first_token is None or times.last_token is None:
            times.first_token = now
            self._time_to_first_token.observe(now - times.arrived)
            self._read(times.prompt)
            self.totals.first_tokens += 1
            self.totals.first_token_seconds += now - times.arrived
        else:
            self._inter_token_latency.observe((now - times.last_token) / count, count)
            self.totals.later_tokens += count
            self.totals.later_token_seconds += now - times.last_token
        times.last_token = now

    def _read(self, prompt: int) -> None:
        """Counts the tokens of a processed prompt."""
        self._prompt_tokens.inc(prompt)
        self.totals.prompt_tokens += prompt

    def finished(self, completion: Completion, now: float) -> None:
        """Records the end of a row."""
        assert completion.request.id is not None
        times = self._rows.pop(completion.request.id)
        reason = REASONS.get(completion.finish_reason, "error")
        self._success.labels(self.model, reason).inc()
        self._e2e_latency.observe(now - times.arrived)
        if (queued := completion.seconds_queued) is not None:
            self._queue.observe(queued)
            if (first := completion.seconds_to_first_token) is not None:
                self._prefill.observe(first - queued)
        self._request_prompt.observe(times.prompt)
        self._request_generated.observe(len(completion.tokens))
        if times.first_token is None and completion.finish_reason is FinishReason.LENGTH:
            self._read(times.prompt)  # for an embedding, or only for log-probabilities
        if times.first_token is not None and times.last_token is not None:
            self._decode.observe(times.last_token - times.first_token)

    def refused(self, status: int) -> None:
        self._rejected.labels(self.model, str(status)).inc()

    def left(self) -> None:
        """Counts a client that disconnected before its answer's end."""
        self._disconnected.inc()

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _Gauges(Collector):
    """The gauges and counters that a scrape reads from the snapshot, the limits and the plan."""

    def __init__(self, metrics: ServerMetrics):
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        metrics, labels = self._metrics, ["model_name"]
        snapshot, limits, plan = metrics.snapshot, metrics.limits, metrics.plan

        def gauge(name: str, documentation: str, value: float) -> Metric:
            family = GaugeMetricFamily(name, documentation, labels=labels)
            family.add_metric([metrics.model], value)
            return family

        pages = limits.pages * limits.groups if limits else 0
        yield gauge("vllm:num_requests_running", "Number of requests in the batch.", snapshot.rows)
        yield gauge(
            "vllm:num_requests_waiting", "Number of requests that wait for a row.", metrics.waiting
        )
        used = snapshot.pages / pages if pages else 0.0
        yield gauge(
            "vllm:kv_cache_usage_perc", "Fraction of the cache pages in use, from 0 to 1.", used
        )
        yield gauge("jaxattn:pages_in_use", "Number of cache pages in use.", snapshot.pages)
        yield gauge("jaxattn:slots_in_use", "Number of state slots in use.", snapshot.slots)
        for name, said, count in (
            (
                "vllm:num_preemptions",
                "Number of rows that were preempted, so that older rows get their pages.",
                snapshot.preemptions,
            ),
            (
                "vllm:prefix_cache_queries",
                "Number of prompt tokens looked up in the prefix cache.",
                snapshot.prefix_queries,
            ),
            (
                "vllm:prefix_cache_hits",
                "Number of prompt tokens found in the prefix cache and not processed again.",
                snapshot.prefix_hits,
            ),
            (
                "jaxattn:prefix_states_missed",
                "Number of prompt tokens whose pages, but not states, were in the prefix cache.",
                snapshot.states_missed,
            ),
            (
                "vllm:spec_decode_num_draft_tokens",
                "Number of tokens drafted by prompt lookup or by the model's draft head.",
                snapshot.drafted,
            ),
            (
                "vllm:spec_decode_num_accepted_tokens",
                "Number of drafted tokens that were accepted.",
                snapshot.accepted,
            ),
        ):
            counter = CounterMetricFamily(name, said, labels=labels)
            counter.add_metric([metrics.model], count)
            yield counter
        seal = CounterMetricFamily(
            "jaxattn:seal",
            "Number of traces, compilations and allocations after the warm-up.",
            labels=[*labels, "kind"],
        )
        for kind, count in snapshot.seal.items():
            seal.add_metric([metrics.model, kind], count)
        yield seal
        drafting = GaugeMetricFamily(
            "jaxattn:drafting",
            "Whether the model's draft head drafts in steps of up to this number of rows.",
            labels=[*labels, "rows"],
        )
        for rows, drafts in sorted(snapshot.drafting.items()):
            drafting.add_metric([metrics.model, str(rows)], int(drafts))
        yield drafting
        if limits is None or plan is None:
            return
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The number and the size of the cache's pages.",
            labels=[*labels, "num_gpu_blocks", "block_size"],
        )
        info.add_metric([metrics.model, str(pages), str(limits.page_tokens)], 1)
        yield info
        lines = GaugeMetricFamily(
            "jaxattn:plan_bytes", "Bytes of each line of the memory plan.", labels=[*labels, "line"]
        )
        for item in plan.items:
            lines.add_metric([metrics.model, item.name], item.nbytes)
        yield lines
