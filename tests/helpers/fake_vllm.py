"""Packages named vllm and torch, with the interface that the bench's adapter uses.

The fake engine gives each running request a token per step of a millisecond. The fake server
answers /health and /collective_rpc, and writes the request to a file.
"""

from pathlib import Path

ENGINE = """
import json, pathlib, time
from types import SimpleNamespace as Space
from vllm import sampling_params
__version__ = "0.26.0"
SamplingParams = Space

class Engine:
    def __init__(self):
        self.vllm_config = Space(
            model_config=Space(max_model_len=200),
            scheduler_config=Space(max_num_seqs=2, max_num_batched_tokens=64),
            cache_config=Space(gpu_memory_utilization=0.9, enable_prefix_caching=True),
        )
        self.running = {}
    def add_request(self, name, prompt, params):
        assert all(type(token) is int for token in prompt["prompt_token_ids"])
        self.running[name] = params.max_tokens
    def has_unfinished_requests(self):
        return bool(self.running)
    def step(self):
        time.sleep(0.001)
        rows = list(self.running)[:2]
        for name in rows:
            self.running[name] -= 1
            if not self.running[name]: del self.running[name]
        return [Space(request_id=name, outputs=[Space(token_ids=[7])]) for name in rows]

class LLM:
    def __init__(self, **given):
        config = json.loads((pathlib.Path(given["model"]) / "config.json").read_text())
        assert config["architectures"] == ["Qwen3ForCausalLM"], config
        assert given["load_format"] == "dummy" and given["skip_tokenizer_init"], given
        assert given["worker_extension_cls"].endswith("VllmDummyWeights"), given
        self.llm_engine = Engine()
    def collective_rpc(self, method):
        assert method == "set_ordinary_weights"
        return [{"norms": 3}]
    def generate(self, prompts, params, use_tqdm):
        time.sleep(0.001 * max(each.max_tokens for each in params))
        return [Space(outputs=[Space(token_ids=[7] * each.max_tokens)]) for each in params]
"""
TORCH = """
from types import SimpleNamespace as Space
__version__ = "2.11.0"
cuda = Space(
    get_device_name=lambda: "fake card", get_device_properties=lambda n: Space(total_memory=10**10)
)
"""
SERVER = """
import http.server, json, os, pathlib, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked = {"path": self.path, "body": body, "given": given, "pid": os.getpid(),
                 "argv": sys.argv}
        pathlib.Path(__file__).with_name("asked.json").write_text(json.dumps(asked))
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", int(given["--port"])), Handler).serve_forever()
"""
ASKED = Path("vllm", "entrypoints", "openai", "asked.json")


def write_packages(folder: Path) -> None:
    """Writes both packages into a folder for `sys.path` and PYTHONPATH."""
    server = folder / "vllm" / "entrypoints" / "openai"
    server.mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text(ENGINE)
    kinds = "from types import SimpleNamespace\nRequestOutputKind = SimpleNamespace(DELTA=1)\n"
    (folder / "vllm" / "sampling_params.py").write_text(kinds)
    (folder / "torch.py").write_text(TORCH)
    (server / "api_server.py").write_text(SERVER)
