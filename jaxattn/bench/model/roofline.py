"""The bytes that a decode step has to move, and the operations of prefill, from shapes.

A decode step reads every weight outside the experts once (including the head, not the embedding),
the experts that it uses, and the rows' latents, keys and values. It reads and writes the rows'
recurrent states. Activations do not count.
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

# Bytes per second that read-only kernels reach, by a part of the GPU's name.
RATES = {"H200": 4.0e12, "H100": 2.9e12}
# FLOP of the recurrence per number of a state and token: the decay, k S, the update, q S.
STATE_FLOP = 1 + 2 + 2 + 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class RooflineBytes:
    """The bytes that a decode step moves.

    Attributes:
        weights: Weights outside the experts.
        experts: Weights of the experts that the step uses.
        pages: Latents, keys and values that are read.
        states: Recurrent states, read and written.
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
        """The bytes by `op_categories.KINDS`; the router's few are in the dense products."""
        attention = self.pages + self.states
        return {"attention": attention, "experts": self.experts, "dense products": self.weights}


def rate[Other](device: str, other: Other) -> float | Other:
    """Bytes per second of the GPU's roofline, or `other` if the GPU is unknown."""
    return next((rate for name, rate in RATES.items() if name in device), other)


def moved(model: DecoderModel, rows: int, context: int, touched: float) -> RooflineBytes:
    """Returns the bytes of a decode step of `rows` rows of `context` tokens.

    Args:
        touched: The mean number of distinct routed experts per MoE layer.
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
    """Returns the FLOP for a prompt of `tokens` tokens, and the mixer types that are not counted.

    Weights count two operations per number and token, experts only the fraction that a token uses,
    and the head one token. Attention counts the unmasked pairs of tokens.
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
    """FLOP of a layer's attention or recurrence over a prompt, without products with weights."""
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
    """The path and the shape of each parameter."""
    leaves = jax.tree.leaves_with_path(model.param_shapes())
    return [(tuple(key.key for key in path if hasattr(key, "key")), leaf) for path, leaf in leaves]


def _taken(model: DecoderModel, key: Key) -> float:
    """The fraction of a layer's experts that a token uses."""
    number, place = int(key[1]), int(key[3])
    kind = model.spec.segments[number].pattern[place].feed_forward
    assert isinstance(kind, MoE)
    return (kind.router.top_k + kind.always) / (kind.router.experts + kind.always)


def _growth(model: DecoderModel) -> tuple[int, int]:
    """Bytes that all caches grow by for one more page, and for one more slot."""

    def size(pages: int, slots: int) -> int:
        wanted = CacheSize(pages=pages, slots=slots)
        return sum(nbytes(cache.shapes(wanted)) for cache in model.caches)

    return size(2, 1) - size(1, 1), size(1, 2) - size(1, 1)
