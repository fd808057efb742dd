"""Sizes of a model that this package runs, from the shapes of its parameters.

    DecoderSizes.of("Youtu-LLM-2B", model)

The parameters are those that the loader allocates, so a line of the plan is the sum of their bytes.
"""

import dataclasses
import math
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxattn.arena import ArenaSpec
from jaxattn.core.numerics.fp8_block_scaling import BLOCK, block_counts
from jaxattn.memory.plan import nbytes
from jaxattn.models.blocks import GQA, MLA, MLP, DeltaMixer, MoE
from jaxattn.models.caches.layer_cache import LayerCache
from jaxattn.models.catalog.model_sizes import LayerSizes, ModelSizes, WeightGroup
from jaxattn.models.catalog.param_roles import param_role, with_local_heads
from jaxattn.models.families.components.quantization import INT4, Quantization
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.nn.four_bit_linear import FourBitLinears


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSizes(ModelSizes):
    """The sizes of a decoder, for a plan.

    Attributes:
        model: The decoder, with the weight formats that the loader creates.
        quantization: Quantization of its checkpoint.
    """

    model: DecoderModel
    quantization: Quantization | None = None

    @classmethod
    def of(
        cls,
        name: str,
        model: DecoderModel,
        quantization: Quantization | None = None,
        *,
        unread: str = "",
    ) -> "DecoderSizes":
        """Returns the sizes of a decoder.

        Args:
            unread: Description of the tensors that the loader skips.

        Raises:
            ValueError: A parameter has no role; the message names it.
        """
        shapes = model.param_shapes()
        dtypes = "/".join(sorted({jnp.dtype(leaf.dtype).name for leaf in jax.tree.leaves(shapes)}))
        return cls(
            name=name,
            weights=weights_of(model),
            max_position_embeddings=model.max_position_embeddings,
            stored=f"{dtypes}, {_as_loaded(model, quantization)}",
            unread=unread,
            model=model,
            quantization=quantization,
        )

    @cached_property
    def whole_fp8_bytes(self) -> int:
        """The bytes of the weights if every FP8 matrix of the checkpoint stayed FP8."""
        total = 0
        for key, leaf in nnx.to_flat_state(self.model.param_shapes()):
            wide = jnp.dtype(leaf.dtype).itemsize > 1
            if wide and param_role(self.model.spec, key).published_fp8:
                scales = math.prod((*leaf.shape[:-2], *block_counts(*leaf.shape[-2:])))
                total += leaf.size + 4 * scales
            else:
                total += leaf.size * jnp.dtype(leaf.dtype).itemsize
        return total

    @property
    def num_heads(self) -> int:
        mixers = self.model.spec.mixers.values()
        return max((each.num_heads for each in mixers if isinstance(each, MLA | GQA)), default=0)

    @property
    def dtype(self) -> str:
        return self.model.spec.stream.dtype

    @cached_property
    def sizes(self) -> LayerSizes:
        spec = self.model.spec
        attention_sizes: dict[str, Any] = {"num_heads": 0, "qk_dim": 0, "v_dim": 0}
        for mixer in spec.mixers.values():
            if isinstance(mixer, MLA):
                attention_sizes |= _of_mla(mixer)
            elif isinstance(mixer, GQA):
                heads = max(attention_sizes["num_heads"], mixer.num_heads)
                attention_sizes |= {
                    "num_heads": heads,
                    "qk_dim": mixer.head_dim,
                    "v_dim": mixer.head_dim,
                }
            elif isinstance(mixer, DeltaMixer):
                attention_sizes |= {
                    "state_heads": mixer.state_shape[0],
                    "key_heads": mixer.key_heads,
                    "state_shape": mixer.state_shape[1:],
                    "conv_channels": mixer.conv_dim,
                }
            else:
                raise ValueError(
                    "a plan for several GPUs supports only MLA, GQA, GDN and KDA layers; "
                    f"{self.name} has {type(mixer).__name__} layers"
                )
        kinds = {block.feed_forward for block in spec.blocks}
        mlps = [each.intermediate_size for each in kinds if isinstance(each, MLP)]
        moes = [each for each in kinds if isinstance(each, MoE)]
        return LayerSizes(
            vocab_size=spec.vocab_size,
            hidden_size=spec.stream.hidden_size,
            mlp_size=max([*mlps, *(each.shared_size for each in moes)], default=0),
            experts=max((each.router.experts for each in moes), default=0),
            top_k=max((each.router.top_k for each in moes), default=0),
            expert_size=max((each.expert_size for each in moes), default=0),
            widened=_largest_fp8(self.model),
            **attention_sizes,
        )

    def in_cache_format(self, name: str, native_layers: int = 0) -> "DecoderSizes":
        if name == "auto" and not native_layers:
            return self
        model = self.model.with_cache_format(name, native_layers)
        return DecoderSizes.of(self.name, model, self.quantization, unread=self.unread)

    def caches(self, num_shards: int = 1, cache_dtype: str | None = None) -> tuple[LayerCache, ...]:
        return with_local_heads(self.model, num_shards, cache_dtype).caches

    def scratch(
        self, rows: int, *, q_len: int, max_pages: int, num_shards: int = 1, gathered: int = 1
    ) -> tuple[ArenaSpec, ...]:
        own = with_local_heads(self.model, num_shards).scratch(
            rows, q_len=q_len, max_pages=max_pages
        )
        kinds = {block.feed_forward for block in self.model.spec.blocks}
        tokens, stream = rows * q_len * gathered, self.model.spec.stream
        return (*own, *(each.scratch(stream, tokens) for each in kinds if gathered > 1))

    def copied_bytes(self, num_shards: int = 1) -> int:
        model = with_local_heads(self.model, num_shards)
        shapes = model.param_shapes()
        return nbytes(jax.eval_shape(model.pack, shapes)) - nbytes(shapes)


def _as_loaded(model: DecoderModel, quantization: Quantization | None) -> str:
    """Describes the form in which the loader keeps the checkpoint's weights."""
    if quantization is None:
        return "as the loader stores them"
    if quantization == "mxfp4" or quantization in INT4:
        name = quantization.partition("-")[0].partition("_")[0].upper()
        kinds = [block.feed_forward for block in model.spec.blocks]
        forms = {each.form for each in kinds if isinstance(each, MoE)}
        layers = [each for block in model.spec.blocks for each in (block.mixer, block.feed_forward)]
        dense = any(isinstance(each.fp8, FourBitLinears) for each in layers)
        four_bit = [
            what for what, is_so in (("experts", forms - {None}), ("matrices", dense)) if is_so
        ]
        if not four_bit:
            return f"{name} weights dequantized to bfloat16 on loading"
        return (
            f"{name} {' and '.join(four_bit)} kept in 4 bits, other {name} weights dequantized to "
            "bfloat16 on loading"
        )
    if quantization != "fp8":
        scales = quantization.removeprefix("fp8 by ")
        return f"FP8 matrices with a scale for each {scales} dequantized to bfloat16 on loading"
    kinds = [block.feed_forward for block in model.spec.blocks]
    shared = any(isinstance(each, MoE) and each.always for each in kinds)
    fp8 = any(each.fp8 for block in model.spec.blocks for each in (block.mixer, block.feed_forward))
    kept = "matrices without an FP8 kernel" if fp8 else "other FP8 matrices"
    kinds_kept = f"{'routed and shared' if shared else 'routed'} experts"
    return (
        f"{kinds_kept}{' and other matrices' if fp8 else ''} in FP8 with one scale per "
        f"{BLOCK} x {BLOCK} block, {kept} dequantized to bfloat16 on loading"
    )


def _largest_fp8(model: DecoderModel) -> int:
    """Returns the number of elements of the largest linear that stays FP8."""
    stream = model.spec.stream
    blocks = dict.fromkeys(model.spec.blocks)
    layers = [layer for block in blocks for layer in (block.mixer, block.feed_forward)]
    kept = (layer.matrices(stream)[name] for layer in layers for name in layer.fp8)
    return max((matrix.inner * matrix.out for matrix in kept), default=0)


def _of_mla(mixer: MLA) -> dict[str, Any]:
    return {
        "num_heads": mixer.num_heads,
        "qk_dim": mixer.qk_nope_head_dim + mixer.qk_rope_head_dim,
        "v_dim": mixer.v_head_dim,
        "latent": mixer.kv_lora_rank + mixer.qk_rope_head_dim,
        "low_rank": mixer.q_lora_rank or 0,
    }


def weights_of(model: DecoderModel) -> tuple[WeightGroup, ...]:
    """Returns the lines of a decoder's parameters, in the order of its state."""
    groups = []
    for key, leaf in nnx.to_flat_state(model.param_shapes()):
        part = param_role(model.spec, key)
        stack, shape = leaf.shape[: part.stacked], leaf.shape[part.stacked :]
        weights = WeightGroup(
            kind=part.line,
            shape=shape,
            count=math.prod(stack),
            split=part.split,
            quantized=False,
            dtype_bytes=jnp.dtype(leaf.dtype).itemsize,
            scales=part.scales,
            numbers=None if part.form is None else part.numbers(shape),
        )
        if part.always:
            shared = weights.count // stack[-1] * part.always
            groups.append(
                dataclasses.replace(weights, kind="shared experts", split="dense", count=shared)
            )
            weights = dataclasses.replace(weights, count=weights.count - shared)
        groups.append(weights)
    return tuple(groups)
