"""vLLM as an engine of `jaxattn.bench.offline.measures`, with dummy weights.

vLLM runs with its default options, except those that random weights need. Dummy weights are all
close to 0, so every row would choose the same experts and the same next token, and MoE layers would
read fewer weights than in use. So each worker gets `VllmDummyWeights`, which sets norms, routers
and embeddings to ordinary values after loading.

The module was written for vLLM 0.26.0. `pip install vllm==0.26.0` installs all it needs.
"""

import functools
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxattn.bench.baselines.vllm_dummy_weights import WEIGHTS, WORKER_EXTENSION
from jaxattn.bench.offline.measures import MeasureError
from jaxattn.bench.offline.workload import OfflineRequest

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc
}
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "worker_extension_cls": WORKER_EXTENSION,
}


def missing() -> str | None:
    """The reason why vLLM cannot run here; None if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed in this environment: pip install vllm==0.26.0"
    return None


class VllmEngine:
    """`vllm.LLM` with dummy weights.

    Args:
        folder: A folder with a config.json.
        options: Additional arguments of `LLM`.
    """

    name = "vLLM"

    def __init__(self, folder: str, options: Mapping[str, Any]) -> None:
        os.environ.update(ENVIRONMENT)
        import vllm

        fields = fields_of(Path(folder))
        self._options = text_options(fields) | dict(options)
        self._llm = vllm.LLM(model=folder, skip_tokenizer_init=True, **(OPTIONS | self._options))
        self._weights = self._llm.collective_rpc(WEIGHTS)[0]
        self._serial = 0
        self._params = functools.partial(
            vllm.SamplingParams, temperature=0.0, ignore_eos=True, detokenize=False
        )
        self._delta = vllm.sampling_params.RequestOutputKind.DELTA
        self.vocab_size = fields.get("text_config", fields)["vocab_size"]
        self.longest = self._config.model_config.max_model_len

    @property
    def _config(self) -> Any:
        return self._llm.llm_engine.vllm_config

    def generate(self, requests: Sequence[OfflineRequest]) -> None:
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        params = [self._params(max_tokens=request.answer) for request in requests]
        done = self._llm.generate(prompts, params, use_tqdm=False)
        for request, completion in zip(requests, done, strict=True):
            _check(request, len(completion.outputs[0].token_ids))

    def steps(self, requests: Sequence[OfflineRequest]) -> Iterator[list[int]]:
        engine, ours, given = self._llm.llm_engine, {}, [0] * len(requests)
        for place, request in enumerate(requests):
            self._serial += 1
            ours[name := f"steps-{self._serial}"] = place
            params = self._params(max_tokens=request.answer, output_kind=self._delta)
            engine.add_request(name, {"prompt_token_ids": request.prompt}, params)
        while engine.has_unfinished_requests():
            got = [
                ours[output.request_id]
                for output in engine.step()
                for each in output.outputs
                for _ in each.token_ids
            ]
            for place in got:
                given[place] += 1
            yield got
        for request, count in zip(requests, given, strict=True):
            _check(request, count)

    def facts(self) -> dict[str, Any]:
        import torch
        import vllm

        scheduler, cache = self._config.scheduler_config, self._config.cache_config
        return {
            "version": vllm.__version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(),
            "options": {
                "max_num_seqs": scheduler.max_num_seqs,
                "max_num_batched_tokens": scheduler.max_num_batched_tokens,
                "max_model_len": self.longest,
                "gpu_memory_utilization": cache.gpu_memory_utilization,
                "enable_prefix_caching": cache.enable_prefix_caching,
                **self._options,
            },
            "ordinary weights": self._weights,
        }

    def memory(self) -> dict[str, float]:
        """The memory that vLLM may use; the GPU's usage covers its worker, a separate process."""
        import torch

        share = self._config.cache_config.gpu_memory_utilization
        return {"planned": share * torch.cuda.get_device_properties(0).total_memory / 1e9}


def fields_of(folder: Path) -> dict[str, Any]:
    """The fields of a folder's config.json."""
    fields: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return fields


def text_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The option for a text model inside a multimodal one, because no image is ever sent."""
    return {"language_model_only": True} if "text_config" in fields else {}


def _check(request: OfflineRequest, got: int) -> None:
    if got != request.answer:
        raise MeasureError(f"a request for {request.answer} tokens generated {got}")
