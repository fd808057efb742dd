"""The bytes that a decode step has to read and write, and the operations of prefill, from shapes.

Of a decode step: every weight outside the experts once (the head too, the embedding not), the
experts that were touched, the rows' latents, keys and values, and their states read and written.
Activations do not count.
"""

import dataclasses
import math

import jax

from jaxattn.core.cache.formats import PAGE_SIZE
from jaxattn.memory.plan import nbytes
from jaxattn.models.blocks import GQA, MLA, DeltaMixer, Mixer, MoE
from jaxattn.models.caches.layer_cache import CacheSize
from jaxattn.models.catalog.param_roles import param_role
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.weight_map.tensor_mapping import Key

# Bytes per second that kernels reach when they only read, by a part of the card's name.
RATES = {"H200": 4.0e12, "H100": 2.9e12}
# The recurrence per number of a state and token: the decay, k S, the update, q S.
STATE_FLOP = 1 + 2 + 2 + 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class RooflineBytes:
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

    @property
    def by_kind(self) -> dict[str, int]:
        """The same by `op_categories.KINDS`; the router's few are among the products'."""
        attention = self.pages + self.states
        return {"attention": attention, "experts": self.experts, "dense products": self.weights}


def rate[Other](device: str, other: Other) -> float | Other:
    """Bytes per second of the roof: the card's, or `other` where it is unknown."""
    return next((rate for name, rate in RATES.items() if name in device), other)


def moved(model: DecoderModel, rows: int, context: int, touched: float) -> RooflineBytes:
    """The bytes of a decode step of `rows` rows of `context` tokens.

    Args:
        touched: distinct routed experts of a layer with experts, on average.
    """
    weights = experts = 0.0
    for key, leaf in leaves_of(model):
        part = param_role(model.spec, key)
        match part.line:
            case "experts":
                experts += nbytes(leaf) * (touched + part.always) / leaf.shape[1]
            case "embedding" if not model.spec.tie_embeddings:
                pass
            case _:
                weights += nbytes(leaf)
    page, slot = _growth(model)
    return RooflineBytes(
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
    for key, leaf in leaves_of(model):
        part = param_role(model.spec, key)
        matrix = leaf.ndim - part.stacked >= 2 and "conv1d" not in key
        if not matrix or part.scales or part.line in ("embedding", "head"):
            continue
        share = _taken(model, key) if part.line == "experts" else 1.0
        total += 2 * part.numbers(leaf.shape) * share * tokens
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
    if isinstance(mixer, GQA):
        seen = min(tokens, mixer.window or tokens)
        pairs = seen * (seen + 1) / 2 + (tokens - seen) * seen
        return 2.0 * mixer.num_heads * 2 * mixer.head_dim * pairs
    if isinstance(mixer, DeltaMixer):
        return float(STATE_FLOP * math.prod(mixer.state_shape) * tokens)
    return None


def leaves_of(model: DecoderModel) -> list[tuple[Key, jax.ShapeDtypeStruct]]:
    """Each parameter's place in the tree and its shape."""
    leaves = jax.tree.leaves_with_path(model.param_shapes())
    return [(tuple(key.key for key in path if hasattr(key, "key")), leaf) for path, leaf in leaves]


def _taken(model: DecoderModel, key: Key) -> float:
    """The share of a layer's experts that a token takes."""
    number, place = int(key[1]), int(key[3])
    kind = model.spec.segments[number].pattern[place].feed_forward
    assert isinstance(kind, MoE)
    return (kind.router.top_k + kind.always) / (kind.router.experts + kind.always)


def _growth(model: DecoderModel) -> tuple[int, int]:
    """Bytes of all caches for one page more, and for one slot more."""

    def size(pages: int, slots: int) -> int:
        wanted = CacheSize(pages=pages, slots=slots)
        return sum(nbytes(cache.shapes(wanted)) for cache in model.caches)

    return size(2, 1) - size(1, 1), size(1, 2) - size(1, 1)
