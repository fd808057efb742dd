"""Grouped-query attention as a mixer of tokens: its caches, its scratch and its two steps."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxattn import gqa
from jaxattn.arena import ArenaSpec
from jaxattn.core.cache.formats import FP8_BITS, TURBOQUANT, KVFormat
from jaxattn.core.numerics.rope import QueryScaling, RopeConfig
from jaxattn.models.blocks.mixer import Matrix, Stream
from jaxattn.models.blocks.paged_mixer import PagedMixer, attended
from jaxattn.models.caches.cache_layouts import KeyValuePages, TurboquantPages
from jaxattn.models.caches.layer_cache import Arrays
from jaxattn.nn import GroupedQueryAttention, TurboQuantAttention


@dataclasses.dataclass(frozen=True, kw_only=True)
class GQA(PagedMixer):
    """Grouped-query attention over pages of keys and values, with Qwen3's parameter names.

    Attributes:
        rope: Rotation of the first `rope.dim` dims of a head. Layers without rotation (theta None)
            have a separate cache, as do layers with another window.
        qk_norm: Whether each head's query and key have RMS norms.
        heads_norm: Whether one RMS norm covers all heads of a query or key together.
        gated: Whether the output is multiplied by sigmoid(gate).
        biases: Whether queries, keys and values have biases.
        out_bias: Whether the output has a bias.
        query_scaling: Scaling of queries beyond the trained context.
        window: Number of keys that a token sees, its own included. None means all before it.
        sinks: Whether each head has a logit without a value in its softmax.
        cache_format: Format of the cache for `KVFormat`. None means the compute dtype.
        is_native: Whether these layers keep the compute dtype while others use another format.
        fp8_bits: Whether an FP8 cache is an array of the numbers' bits, for CPUs.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    qk_norm: bool = False
    heads_norm: bool = False
    gated: bool = False
    biases: bool = False
    out_bias: bool = False
    query_scaling: QueryScaling | None = None
    window: int | None = None
    sinks: bool = False
    cache_format: str | None = None
    is_native: bool = False
    fp8_bits: bool = False

    norms = True
    cache_formats = ("bfloat16", "fp8", *TURBOQUANT)
    unpacked_params = (
        "sinks", "kv_scale", "q_bias", "k_bias", "v_bias", "o_bias", "q_heads_norm", "k_heads_norm",
    )  # fmt: skip

    def in_format(self, name: str) -> "GQA":
        if name in TURBOQUANT:
            gqa.TurboFormat(preset=name, head_dim=self.head_dim)  # raises, or warns
        return dataclasses.replace(self, cache_format=name, is_native=False)

    def with_separate_cache(self) -> "GQA":
        return dataclasses.replace(self, cache_format=None, is_native=True)

    @property
    def cache_name(self) -> str:
        of_window = "" if self.window is None else f" of the last {self.window}"
        unrotated = " without rotation" if self.rope.theta is None else ""
        return f"keys and values{of_window}{unrotated}{' set apart' if self.is_native else ''}"

    @property
    def array(self) -> str:
        """The name of the cache's array, which depends on window, rotation and `is_native`."""
        of_window = "" if self.window is None else f"_{self.window}"
        unrotated = "_unrotated" if self.rope.theta is None else ""
        return f"kv_cache{of_window}{unrotated}{'_apart' if self.is_native else ''}"

    @property
    def kernels(self) -> dict[str, str]:
        if self.coded is not None:
            attention = f"turbo_decode_{self.coded.preset}"
            return {"turbo_append": "turbo_append", "turbo_attention": attention}
        return {"gqa_append": "gqa_append", "gqa_decode": "gqa_decode"}

    @property
    def coded(self) -> gqa.TurboFormat | None:
        """The format of a TurboQuant cache, or None for another cache."""
        if self.cache_format not in TURBOQUANT:
            return None
        return gqa.TurboFormat(preset=self.cache_format, head_dim=self.head_dim)

    def matrices(self, stream: Stream) -> dict[str, Matrix]:
        hidden, heads = stream.hidden_size, self.num_heads * self.head_dim
        keys = Matrix(hidden, self.num_kv_heads * self.head_dim)
        return {
            "q_proj": Matrix(hidden, heads * (2 if self.gated else 1)),
            "k_proj": keys,
            "v_proj": keys,
            "o_proj": Matrix(heads, hidden),
        }

    def format(self, stream: Stream) -> KVFormat:
        return KVFormat(self.cache_format or stream.dtype, self.head_dim)

    def build(self, stream: Stream, rngs: nnx.Rngs) -> GroupedQueryAttention:
        module: Any = GroupedQueryAttention
        if self.coded is not None:
            module = functools.partial(TurboQuantAttention, self.coded.preset)
        return module(
            stream.hidden_size,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            rope=self.rope,
            qk_norm=self.qk_norm,
            heads_norm=self.heads_norm,
            gated=self.gated,
            biases=self.biases,
            out_bias=self.out_bias,
            query_scaling=self.query_scaling,
            window=self.window,
            sinks=self.sinks,
            scaled_cache=self.cache_format == "fp8",
            fp8=self.fp8,
            eps=stream.eps,
            norm_dtype=stream.norm_dtype,
            parallel=self.parallel,
            **stream.dtypes,
            rngs=rngs,
        )

    def cache(self, stream: Stream, layers: int) -> KeyValuePages | TurboquantPages:
        if self.coded is not None:
            return TurboquantPages(
                name=self.cache_name,
                layers=layers,
                heads=self.num_kv_heads,
                form=self.coded,
                array=self.array,
            )
        stored = self.format(stream).dtype
        return KeyValuePages(
            name=self.cache_name,
            layers=layers,
            heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=FP8_BITS if self.fp8_bits and self.cache_format == "fp8" else stored,
            array=self.array,
        )

    def scratch(
        self, stream: Stream, rows: int, *, q_len: int, max_pages: int, page_size: int
    ) -> ArenaSpec:
        rows, q_len, heads = attended(self.parallel, rows, q_len, self.num_heads)
        return gqa.scratch(
            batch=rows,
            q_len=q_len,
            num_heads=heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=jnp.dtype(stream.dtype),
            # A TurboQuant cache needs the scratch of keys and values in the queries' dtype.
            cache_dtype=None if self.coded is not None else self.format(stream).dtype,
            max_pages=max_pages,
            page_size=page_size,
        )

    @property
    def exchanged(self) -> tuple[int, int, int]:
        return self.num_heads, self.head_dim * (1 + self.gated), self.head_dim

    def page_size(self, arrays: Arrays) -> int:
        kv_cache = arrays[self.array]
        return int(kv_cache.shape[3]) if self.coded is None else self.coded.page_size(kv_cache)

    def options_of_step(self, **sizes: Any) -> dict[str, Any]:
        schedule = gqa.decode_schedule(
            **sizes,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            window=self.window,
            batch_invariant=True,  # which costs nothing here (benchmarks/results/gqa.json)
        )
        return {"schedule": schedule}

    def pack(self, params: Any) -> Float[Array, "repeats W"] | None:
        if not self.qk_norm:
            return None
        return gqa.pack_gqa_weights(*(params[n]["weight"][...] for n in ("q_norm", "k_norm")))
