"""Small decoders, and their greedy tokens by steps on one device or over a group of them.

The pages are of four tokens, so that rows of some thirty tokens have pages on every GPU.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxattn.bench.model.random_weights import draw_of
from jaxattn.core.dispatch import Implementation
from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.models import CacheSize, DecodeBatch, DecoderModel, DecoderSpec, PrefillBatch, divided
from jaxattn.models.blocks import (
    GDN,
    GQA,
    KDA,
    MLA,
    MLP,
    Block,
    FeedForward,
    Mixer,
    MoE,
    SparseMLA,
    Stream,
)
from jaxattn.models.interface import init_state, jit_step, scratch_spec
from jaxattn.ops.moe.routing import Router
from jaxattn.parallel import DeviceGroup, Parallel

STEPS = 5


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a run: prompts that are read in two chunks, and pages.

    Attributes:
        table: pages of the longest row with what it generates, and one more.
    """

    lengths: tuple[int, ...] = (29, 17, 23, 16, 31, 2, 19, 30)
    chunk: int = 16
    page: int = 4
    table: int = 10


SMALL = Sizes()

ROPE = RopeConfig(dim=8)
LATENT = MLA(
    num_heads=8,
    q_lora_rank=12,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    rope=ROPE,
)
SPARSE = SparseMLA(
    **{each.name: getattr(LATENT, each.name) for each in dataclasses.fields(LATENT)},
    top_k=9,
    index_heads=2,
    index_head_dim=12,
    shares_indices=True,
)
MIXERS: dict[str, Mixer] = {
    "mla": LATENT,
    "unrotated mla": dataclasses.replace(LATENT, rope=RopeConfig(dim=8, theta=None)),
    "gated mla": dataclasses.replace(LATENT, gated=True),
    "sparse mla": SPARSE,
    "sparse mla without indexer": dataclasses.replace(SPARSE, index_heads=0),
    "fp8 sparse mla": dataclasses.replace(SPARSE, kv_lora_rank=128, cache_dtype="uint8"),
    "gqa": GQA(num_heads=8, num_kv_heads=2, head_dim=16, rope=ROPE, qk_norm=True, gated=True),
    "gdn": GDN(num_k_heads=2, num_v_heads=8, head_k_dim=8, head_v_dim=8),
    "kda": KDA(num_heads=8, head_dim=8, gate_rank=4),
    "bounded kda": KDA(num_heads=8, head_dim=8, lower_bound=-5.0),
}
ROUTER = Router(experts=8, top_k=3, scores="softmax", normalize=True)
FEED_FORWARDS: dict[str, FeedForward] = {
    "mlp": MLP(intermediate_size=24),
    # The shared experts are one more of the stack behind the routed ones.
    "moe": MoE(expert_size=16, router=ROUTER, shared_size=16, shared_gate=True),
    # They are a gated MLP of their own.
    "wide": MoE(expert_size=16, router=ROUTER, shared_size=24),
}


def decoder(*layers: tuple[str, str], tied: bool = False, dtype: str = "float32") -> DecoderModel:
    """A decoder of (mixer, feed-forward) layers. Its 61 tokens go evenly over no group."""
    return DecoderModel(
        DecoderSpec(
            vocab_size=61,
            stream=Stream(hidden_size=32, eps=1e-6, dtype=dtype, param_dtype=dtype),
            blocks=tuple(Block(MIXERS[mixer], FEED_FORWARDS[each]) for mixer, each in layers),
            max_position_embeddings=64,
            tie_embeddings=tied,
        )
    )


@functools.cache
def drawn_params(model: DecoderModel) -> Any:
    """Uniform ones of NumPy's, which nothing is compiled for."""
    random = np.random.default_rng(3)

    def drawn(path: Any, leaf: Any) -> np.ndarray:
        draw = draw_of(jax.tree_util.keystr(path, simple=True, separator="."), leaf, model)
        values = random.uniform(-draw.reach, draw.reach, leaf.shape) + draw.center
        return values.astype(leaf.dtype)

    return jax.tree.map_with_path(drawn, model.param_shapes())


def prompts(model: DecoderModel, sizes: Sizes) -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [random.integers(0, model.vocab_size, length) for length in sizes.lengths]


@functools.cache
def on_one_device(model: DecoderModel, sizes: Sizes = SMALL) -> tuple[np.ndarray, np.ndarray]:
    return followed(model, Parallel(), sizes)


def followed(
    model: DecoderModel,
    parallel: Parallel,
    sizes: Sizes = SMALL,
    steps: "Stepped | None" = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(greedy tokens [STEPS, rows], logits of the first of them) after prompts of two chunks."""
    steps, chunk = steps or Stepped(model, parallel, sizes), sizes.chunk
    texts, ends = prompts(model, sizes), np.array(sizes.lengths)
    first, second = (
        np.asarray(steps.prefill([text[begin : begin + chunk] for text in texts], begin))
        for begin in (0, chunk)
    )
    last = np.where((ends > chunk)[:, None], second, first)[:, : model.vocab_size]
    tokens = [last.argmax(-1)]
    for step in range(STEPS - 1):
        tokens.append(steps.decode(tokens[-1], ends + step + 1))
    return np.array(tokens), last


class Stepped:
    """A model's compiled steps over a group, with the state between them."""

    def __init__(
        self,
        model: DecoderModel,
        parallel: Parallel,
        sizes: Sizes = SMALL,
        params: Any = None,
        implementation: Implementation | None = None,
    ):
        self.model = own = divided(model, parallel)
        self.vocab_size = model.vocab_size
        self.parallel, self.sizes, self.rows = parallel, sizes, len(sizes.lengths)
        self._options: Any = dict(implementation=implementation)
        prefill = functools.partial(own.prefill, **self._options)
        local = self.rows // parallel.data
        stripes = -(-sizes.table // parallel.context)
        self.tables = np.arange(self.rows * stripes, dtype=np.int32).reshape(self.rows, stripes)
        self.tables -= np.repeat(np.arange(parallel.data) * local * stripes, local)[:, None]
        self.slots = np.tile(np.arange(local, dtype=np.int32), parallel.data)
        size = CacheSize(pages=local * stripes, slots=local, page_size=sizes.page)
        spec = scratch_spec(own, local, max_pages=stripes, page_size=sizes.page)
        make = functools.partial(init_state, own, size, spec)
        params = drawn_params(model) if params is None else params
        columns = PartitionSpec(parallel.axes("data") or None, parallel.axes("tensor") or None)
        if parallel.gpus == 1:
            self.params, self.state = own.pack(params), make()
            self._prefill, self._decode, out = prefill, self._greedy, (None, None)
            self._mixed = self._beside_rows
        else:
            group = DeviceGroup(parallel, tuple(jax.devices()[: parallel.gpus]))
            # NumPy slices without compiling.
            placed = own.place_params(jax.tree.map(np.asarray, params), group)
            self.params = group.join([own.pack(x) for x in group.split(placed)], own.packed_specs())
            specs = (own.packed_specs(), own.state_specs(), group.rows)
            self.state = group.make(make, specs[1])
            for each in own.caches:
                arrays = each.connected(self.state.caches[each.name])
                self.state = self.state.replace(each.name, arrays)
            self._prefill = group.step(prefill, specs, (columns, specs[1]))
            self._decode = group.step(self._greedy, specs, (group.rows, specs[1]))
            both = (*specs[:2], *[group.rows] * 3)
            self._mixed = group.step(self._beside_rows, both, (columns, specs[1]))
            out = group.shardings(((columns, specs[1]), (group.rows, specs[1])))
        self._prefill = jit_step(self._prefill, out_shardings=out[0])
        self._decode = jit_step(self._decode, out_shardings=out[1])
        self._mixed = jit_step(self._mixed, out_shardings=out[0])

    @functools.cached_property
    def compiled_prefill(self) -> Any:
        """The step of a chunk, compiled; `prefill` runs it."""
        batch = self.prefill_batch([np.zeros(1, np.int32)] * self.rows, 0)
        return self._prefill.lower(self.params, self.state, batch).compile()

    @functools.cached_property
    def compiled_decode(self) -> Any:
        """The decode step, compiled; `decode` runs it."""
        batch = self.decode_batch(np.zeros(self.rows, np.int32), np.array(self.sizes.lengths))
        return self._decode.lower(self.params, self.state, batch).compile()

    def _greedy(self, params: Any, state: Any, batch: DecodeBatch) -> tuple[Any, Any]:
        logits, state = self.model.decode(params, state, batch, **self._options)
        return self.model.vocabulary.best(logits)[0], state

    def _beside_rows(
        self, params: Any, state: Any, prompts: PrefillBatch, rows: DecodeBatch, sources: Any
    ) -> tuple[Any, Any]:
        return self.model.mixed(params, state, prompts, rows, sources, **self._options)[:2]

    def prefill_batch(self, chunks: list[np.ndarray], begin: int) -> PrefillBatch:
        tokens = np.zeros((self.rows, self.sizes.chunk), np.int32)
        for row, chunk in enumerate(chunks):
            tokens[row, : len(chunk)] = chunk
        new = np.array([len(chunk) for chunk in chunks], np.int32)
        lens = np.where(new > 0, begin + new, 0).astype(np.int32)
        slots = np.where(new > 0, self.slots, -1).astype(np.int32)
        return PrefillBatch(*map(jnp.asarray, (tokens, new, lens, self.tables, slots)))

    def decode_batch(self, tokens: np.ndarray, lens: np.ndarray) -> DecodeBatch:
        last = np.asarray(tokens, np.int32)[:, None]
        given = (last, lens.astype(np.int32), self.tables, self.slots)
        return DecodeBatch(*map(jnp.asarray, given))

    def prefill(self, chunks: list[np.ndarray], begin: int) -> Any:
        batch = self.prefill_batch(chunks, begin)
        logits, self.state = self.compiled_prefill(self.params, self.state, batch)
        return jax.block_until_ready(logits)

    def decode(self, tokens: np.ndarray, lens: np.ndarray) -> np.ndarray:
        batch = self.decode_batch(tokens, lens)
        chosen, self.state = self.compiled_decode(self.params, self.state, batch)
        return np.asarray(chosen)

    def mixed(self, chunks: list[np.ndarray], begin: int, tokens: np.ndarray, lens: Any) -> Any:
        """The logits of rows of which each has a chunk, or a token where `lens` is above 0."""
        rows = self.decode_batch(tokens, lens)
        slots = np.where(lens > 0, self.slots, -1)
        rows = dataclasses.replace(rows, state_indices=jnp.asarray(slots))
        sources = jnp.asarray(np.where(lens > 0, -1, np.arange(self.rows)).astype(np.int32))
        given = self.prefill_batch(chunks, begin), rows, sources
        logits, self.state = self._mixed(self.params, self.state, *given)
        return np.asarray(logits)[:, : self.vocab_size]
