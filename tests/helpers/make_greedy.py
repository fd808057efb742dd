"""Writes tests/data/greedy_cpu.json: the embedded model's greedy text on a CPU, with the XLA ops.

    JAX_PLATFORMS=cpu python -m tests.helpers.make_greedy

The file also contains the gaps of each text: for each byte, the lead of its logit over the others.
Another device changes the text only if its rounding exceeds a gap.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from jaxattn.cli.serve.default_prompts import PROMPTS
from jaxattn.core.cache.formats import PAGE_SIZE
from jaxattn.core.dispatch import Implementation
from jaxattn.engine.engine import Engine
from jaxattn.engine.requests.request import Request
from jaxattn.limits import Limits
from jaxattn.models.caches.layer_cache import DecodeState
from jaxattn.models.checkpoint import native_format
from jaxattn.models.embedded.hybrid_config import HybridConfig
from jaxattn.models.embedded.hybrid_model import Hybrid
from jaxattn.models.interface import DecodeBatch, PrefillBatch, jit_step
from tests.helpers.model_cases import state_of

FILE = Path(__file__).parents[1] / "data" / "greedy_cpu.json"
TOKENS = 160


@dataclasses.dataclass
class Followed:
    """The result of a model that processes given texts.

    Attributes:
        logits: float32 [B, N, vocab]; `logits[:, i]` predict token i.
        state: The state after the last token but one.
    """

    logits: np.ndarray
    state: DecodeState


jitted = functools.cache(jit_step)


def follow(
    config: HybridConfig,
    params: nnx.State,
    prompts: list[bytes],
    texts: list[bytes],
    implementation: Implementation | None,
) -> Followed:
    """Prefills the prompts, and then decodes each text's bytes, all of N, step by step."""
    batch, count = len(prompts), len(texts[0])
    lens = np.array([len(prompt) for prompt in prompts], np.int32)
    width = -(-int(lens.max() + count) // PAGE_SIZE)
    state = state_of(config, batch, batch * width, batch, max_pages=width)
    slots = np.arange(batch, dtype=np.int32)
    rows = {
        "block_tables": np.arange(batch * width, dtype=np.int32).reshape(batch, width),
        "state_indices": slots,
    }
    padded = np.zeros((batch, lens.max()), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = list(prompt)
    tokens = np.array([list(text) for text in texts], np.int32)

    # Prefill has no kernel for `implementation` to name.
    prefill = jitted(Hybrid(config).prefill, implementation="xla")
    decode = jitted(Hybrid(config).decode, implementation=implementation)
    read = PrefillBatch(tokens=padded, query_lens=lens, seq_lens=lens, **rows)
    logits, state = prefill(params, state, read)
    found = [np.asarray(logits)]
    for i in range(count - 1):
        new = DecodeBatch(tokens=tokens[:, i : i + 1], seq_lens=lens + 1 + i, **rows)
        logits, state = decode(params, state, new)
        found.append(np.asarray(logits))
    return Followed(np.stack(found, axis=1), state)


def gaps(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The lead of each token's logit over all others, [B, N]."""
    others = logits.copy()
    np.put_along_axis(others, tokens[..., None], -np.inf, axis=-1)
    chosen = np.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return chosen - others.max(axis=-1)


def main() -> None:
    config, params = native_format.load(native_format.EMBEDDED)
    prompts = [prompt.encode() for prompt in PROMPTS]
    engine = Engine(Hybrid(config), params, Limits(batch=len(prompts)), implementation="xla")
    done = engine.generate([Request(prompt, max_tokens=TOKENS) for prompt in prompts])
    texts = [bytes(completion.tokens) for completion in done]
    logits = follow(config, params, prompts, texts, "xla").logits
    margins = gaps(logits, np.array([list(text) for text in texts]))
    result = {
        "device": jax.devices()[0].platform,
        "jax": jax.__version__,
        "texts": [
            {"prompt": prompt, "text": text.decode(), "gaps": [round(float(g), 4) for g in row]}
            for prompt, text, row in zip(PROMPTS, texts, margins, strict=True)
        ],
    }
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(result, indent=1) + "\n")
    for text, row in zip(texts, margins, strict=True):
        print(f"smallest gap {row.min():.3f}, at byte {row.argmin()}, of {text[:50]!r}...")


if __name__ == "__main__":
    main()
