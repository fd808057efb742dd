"""The policy that Tunix trains, which maps whole sequences to logits with the served network."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxattn.models import DecoderModel
from jaxattn.models.interface import named_params


class Policy(nnx.Module):
    """A decoder and its parameters, with the call signature of Tunix's models.

    `nnx.state(policy, nnx.Param)["decoder"]` has the tree structure of `model.param_shapes()`.

    Attributes:
        model: The model's description, which an engine serves.
        decoder: The network with its parameters.
        saved: A policy of `jax.checkpoint_policies`, which decides what each repeat of layers saves
            for the backward pass. The rest is recomputed. None saves everything.
    """

    def __init__(
        self, model: DecoderModel, params: nnx.State, saved: Callable[..., bool] | None = None
    ):
        if not isinstance(model, DecoderModel):
            raise TypeError(
                f"Policy: model must be a jaxattn.models.DecoderModel, got {type(model).__name__}"
            )
        for name, each in named_params(model.param_shapes()).items():
            if not jnp.issubdtype(each.dtype, jnp.floating) or each.dtype.itemsize < 2:
                raise ValueError(
                    f"Policy: parameter {name!r} is {each.dtype}, which cannot be trained; load "
                    "the model with dense='bfloat16' and experts='bfloat16'"
                )
        self.model, self.saved = model, saved
        self.decoder = model.bind(params)

    @classmethod
    def of(
        cls,
        model: DecoderModel,
        params: nnx.State,
        dtype: str | None = None,
        param_dtype: str | None = None,
        saved: Callable[..., bool] | None = None,
    ) -> Self:
        """Returns a policy with copied parameters, which a trainer may modify.

        Args:
            params: The parameters, for example from `jaxattn.models.load`. They do not change.
            dtype: The dtype of products and parameters, "float32" or "bfloat16"; None keeps the
                model's.
            param_dtype: The dtype of the parameters, if it differs: bfloat16 would lose small
                optimizer steps. In this case, set `RolloutConfig.data_type` to the engine's dtype.
            saved: See the attribute.
        """
        model = model if dtype is None else model.with_dtype(dtype)
        if param_dtype is not None:
            stream = dataclasses.replace(model.spec.stream, param_dtype=param_dtype)
            spec = dataclasses.replace(model.spec, stream=stream)
            model = DecoderModel(spec, model.tokens)
        shapes = model.param_shapes()
        copied = jax.tree.map(lambda x, shape: jnp.array(x, shape.dtype, copy=True), params, shapes)
        return cls(model, copied, saved)

    @property
    def params(self) -> nnx.State:
        """The parameters, as an engine for `model` accepts them."""
        return nnx.state(self.decoder, nnx.Param)

    def __call__(
        self,
        input_tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        cache: Any = None,
        attention_mask: Bool[Array, "B T T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T vocab"], None]:
        """Returns differentiable float32 logits, and None instead of a cache.

        A row contains one sequence between padding, or with `segment_ids` several packed sequences.
        Each sequence gets the same logits as in the engine.

        Args:
            positions: Ignored. As in the engine, positions count from 0 in each sequence.
            cache: Must be None, because the engine generates.
            attention_mask: True where token t attends to token s. The diagonal marks the tokens
                that are not padding.
            segment_ids: The number of each token's sequence, from 1 on; 0 marks padding. Tunix
                passes it together with the mask, or without the mask for packed sequences.

        Raises:
            ValueError: If `cache` is not None.
        """
        if cache is not None:
            raise ValueError(
                "Policy has no cache, because it processes whole sequences; generate with "
                "EngineRollout: ClusterConfig(rollout_engine=EngineRollout)"
            )
        if segment_ids is None and attention_mask is not None:
            segment_ids = jnp.diagonal(attention_mask, axis1=-2, axis2=-1).astype(jnp.int32)
        packed = {} if segment_ids is None else {"segment_ids": sorted_segments(segment_ids)}
        logits = self.decoder(input_tokens, **packed, saved=self.saved)
        return logits[..., : self.model.vocab_size], None


def sorted_segments(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns segment ids for the layers, which do not decrease before the padding at the end.

    Padding before a row's first sequence becomes a separate sequence. Padding between the tokens of
    a sequence belongs to that sequence, because a model may have sampled the padding token.
    """
    places = jnp.arange(segment_ids.shape[1])
    last = jnp.max(jnp.where(segment_ids > 0, places, -1), axis=1, keepdims=True)
    filled = jax.lax.cummax(jnp.maximum(segment_ids, 0), axis=1) + 1
    return jnp.where(places <= last, filled, 0)
