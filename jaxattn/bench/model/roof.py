"""The bytes that a decode step has to read and write, and the operations of prefill, from shapes.

Of a decode step: every weight outside the experts once (the head too, the embedding not), the
experts that were touched, the rows' latents, keys and values, and their states read and written.
Activations do not count.
"""

import dataclasses
import math
from typing import Any

import jax

from jaxattn.core.formats import PAGE_SIZE
from jaxattn.memory.budget import nbytes
from jaxattn.models.base import CacheSize
from jaxattn.models.blocks import GDN, MLA, Mixer, MoE
from jaxattn.models.decoder import DecoderModel

# Bytes per second that kernels reach when they only read, by a part of the card's name.
RATES = {"H200": 4.0e12, "H100": 2.9e12}
# The recurrence per number of a state and token: the decay, k S, the update, q S.
STATE_FLOP = 1 + 2 + 2 + 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bytes:
    """What a decode step moves.

    Attributes:
        weights: outside the experts.
        experts: of those that were touched.
        pages: latents, keys and values that are read.
        states: read and written.
    """

    weights: int
    experts: int
    pages: int
    states: int

    @property
    def total(self) -> int:
        return self.weights + self.experts + self.pages + self.states


def rate(device: str, copied: float) -> float:
    """Bytes per second of the roof: the card's, or what copies reached where it is unknown."""
    return next((rate for name, rate in RATES.items() if name in device), copied)


def moved(model: DecoderModel, rows: int, context: int, touched: float) -> Bytes:
    """The bytes of a decode step of `rows` rows of `context` tokens.

    Args:
        touched: distinct experts of a layer with experts, on average.
    """
    weights = experts = 0.0
    for keys, leaf in leaves_of(model):
        if router := router_of(model, keys, leaf):
            experts += nbytes(leaf) * touched / router.experts
        elif keys[0] != "embedding" or model.spec.tie_embeddings:
            weights += nbytes(leaf)
    page, slot = _growth(model)
    return Bytes(
        weights=int(weights),
        experts=int(experts),
        pages=rows * context * page // PAGE_SIZE,
        states=2 * rows * slot,
    )


def flops(model: DecoderModel, tokens: int) -> tuple[float, list[str]]:
    """Operations that a prompt of `tokens` tokens needs, and which mixers were left out.

    Weights count twice per token and number, experts by the share that a token takes, the head for
    one token. Attention counts the pairs of tokens that are not masked.
    """
    total, unknown = 0.0, set()
    for keys, leaf in leaves_of(model):
        if "embedding" in keys or any("scale" in str(key) or "conv" in str(key) for key in keys):
            continue
        router = router_of(model, keys, leaf)
        share = router.top_k / router.experts if router else 1.0
        if keys[0] == "segments" and leaf.ndim >= 3:
            total += 2 * math.prod(leaf.shape) * share * tokens
    total += 2 * model.spec.vocab_size * model.spec.stream.hidden_size
    for block in model.spec.blocks:
        mixing = mixer_flops(block.mixer, tokens)
        total += mixing or 0.0
        if mixing is None:
            unknown.add(type(block.mixer).__name__)
    return total, sorted(unknown)


def mixer_flops(mixer: Mixer, tokens: int) -> float | None:
    """Of one layer's attention or recurrence over a prompt, without its products with weights."""
    if isinstance(mixer, MLA):
        width = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim + mixer.v_head_dim
        return 2.0 * mixer.num_heads * width * tokens * (tokens + 1) / 2
    if isinstance(mixer, GDN):
        return float(STATE_FLOP * mixer.num_v_heads * mixer.head_k_dim * mixer.head_v_dim * tokens)
    return None


def leaves_of(model: DecoderModel) -> list[tuple[list[Any], jax.ShapeDtypeStruct]]:
    """(keys, shape) of each parameter."""
    leaves = jax.tree.leaves_with_path(model.param_shapes())
    return [([key.key for key in path if hasattr(key, "key")], leaf) for path, leaf in leaves]


def router_of(model: DecoderModel, keys: list[Any], leaf: jax.ShapeDtypeStruct) -> Any:
    """The router of a stack of routed experts [repeats, E, ...]; None for other parameters."""
    if len(keys) < 5 or keys[0] != "segments" or keys[4] != "mlp":
        return None
    kind = model.spec.segments[keys[1]].pattern[keys[3]].feed_forward
    if not isinstance(kind, MoE) or leaf.ndim < 4 or leaf.shape[1] != kind.router.experts:
        return None
    return kind.router


def _growth(model: DecoderModel) -> tuple[int, int]:
    """Bytes of all caches for one page more, and for one slot more."""

    def size(pages: int, slots: int) -> int:
        wanted = CacheSize(pages=pages, slots=slots)
        return sum(nbytes(cache.shapes(wanted)) for cache in model.caches)

    return size(2, 1) - size(1, 1), size(1, 2) - size(1, 1)
