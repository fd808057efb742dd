"""/metrics and /stats: vLLM's names, and numbers that add up."""

from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.live_server import live, served
from tests.helpers.scripted_engine import ScriptedEngine

# What vLLM's dashboard and the routers that balance load read.
NAMES = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info", "vllm:prompt_tokens", "vllm:generation_tokens",
    "vllm:request_success", "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds", "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens", "vllm:request_generation_tokens", "vllm:iteration_tokens_total",
    "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds",
    "vllm:request_params_n", "vllm:request_params_max_tokens",
    "vllm:num_preemptions", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits",
    "jaxattn:prefix_states_missed", "jaxattn:seal", "jaxattn:plan_bytes",
    "jaxattn:step_seconds", "jaxattn:requests_refused",
}  # fmt: skip


def samples(server) -> dict[str, float]:
    """Every sample by its name and what its labels say beside the model."""
    found = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            labels = [value for key, value in sample.labels.items() if key != "model_name"]
            found[" ".join([sample.name, *labels])] = sample.value
    return found


def test_the_numbers_add_up():
    with live(served(ScriptedEngine)) as server:
        server.complete("abcd", max_tokens=6, n=2)
        server.complete("abcd", stop="c", max_tokens=100)
        server.complete("abcd", temperature=-1)
        assert server.quiet()
        text = server.client.get("/metrics")
        assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
        names = {family.name for family in text_string_to_metric_families(text.text)}
        assert names >= NAMES
        found = samples(server)
        assert found["vllm:prompt_tokens_total"] == 12
        assert found["vllm:request_success_total length"] == 2
        assert found["vllm:request_success_total stop"] == 1
        assert found["vllm:time_to_first_token_seconds_count"] == 3
        generated = found["vllm:generation_tokens_total"]
        assert generated == found["vllm:iteration_tokens_total_sum"] >= 15
        assert generated == found["vllm:request_generation_tokens_sum"]
        assert found["vllm:inter_token_latency_seconds_count"] == generated - 3
        assert found["vllm:request_params_n_sum"] == 3
        assert found["jaxattn:requests_refused_total 400"] == 1
        assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
        assert found["jaxattn:plan_bytes weights"] == 1000
        info = "vllm:cache_config_info 64 16"
        assert found.get(info, found.get("vllm:cache_config_info 16 64")) == 1


def test_rows_that_run_and_wait_are_counted():
    engine = ScriptedEngine(step_seconds=0.01)
    with live(served(lambda: engine)) as server:
        body = {"prompt": "ab", "n": 6, "max_tokens": 250, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_text())
            engine.hold.clear()
            found = samples(server)
            assert found["vllm:num_requests_running"] == 4
            assert found["vllm:num_requests_waiting"] == 2
            assert found["vllm:kv_cache_usage_perc"] == 1.0
            stats = server.client.get("/stats").json()
            assert stats["rows"] == {"used": 4, "of": 4} and stats["waiting"] == 2
            engine.hold.set()
            assert stats["plan"] == [{"name": "weights", "bytes": 1000, "why": "of a test"}]
        assert server.quiet()


def test_prompts_that_begin_alike_hit_the_cache_unless_their_salts_differ(real):
    asked, hits = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
    prompt = "def mean(values):\n    return sum(values) / len(values)\n\n\ndef median(values):\n"

    def read(**fields):
        """Tokens that were looked up for this request, and found."""
        before = samples(real)
        assert real.complete(prompt, max_tokens=1, **fields).status_code == 200
        assert real.quiet()
        after = samples(real)
        return after[asked] - before[asked], after[hits] - before[hits]

    read()  # the engine has served others before this server
    salted = {"cache_salt": "mine"}
    assert read(**salted) == (len(prompt), 0)
    assert read(**salted) == (len(prompt), 64)
    assert read(cache_salt="theirs") == (len(prompt), 0)
