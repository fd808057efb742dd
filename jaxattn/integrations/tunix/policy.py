"""A decoder as Tunix trains it: whole sequences to logits, by the network that an engine serves."""

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
    """A decoder with its parameters, in the call signature of Tunix's models.

    `nnx.state(policy, nnx.Param)["decoder"]` is the tree of `model.param_shapes()`.

    Attributes:
        model: the description that an engine serves.
        decoder: the network with its parameters.
        saved: a policy of `jax.checkpoint_policies`: what a repeat of layers keeps for its backward
            pass, which computes the rest again. None keeps all.
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
                    f"Policy: parameter {name!r} is {each.dtype}, in which nothing trains; load "
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
        """A policy with arrays of its own, which a trainer may change.

        Args:
            params: those of `jaxattn.models.load`, say; they stay as they are.
            dtype: of products and parameters, "float32" or "bfloat16"; None keeps the model's.
            param_dtype: of the parameters, if it differs: a small step of an optimizer is lost in
                bfloat16. Give `RolloutConfig` the `data_type` of the engine's then.
        """
        model = model if dtype is None else model.with_dtype(dtype)
        if param_dtype is not None:
            stream = dataclasses.replace(model.spec.stream, param_dtype=param_dtype)
            spec = dataclasses.replace(model.spec, stream=stream)
            model = DecoderModel(spec, model.tokens)
        shapes = model.param_shapes()
        copied = jax.tree.map(lambda x, to: jnp.array(x, to.dtype, copy=True), params, shapes)
        return cls(model, copied, saved)

    @property
    def params(self) -> nnx.State:
        """The parameters as an engine of `model` takes them."""
        return nnx.state(self.decoder, nnx.Param)

    def __call__(
        self,
        input_tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        cache: Any = None,
        attention_mask: Bool[Array, "B T T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T vocab"], None]:
        """Float32 logits, and no cache; differentiable.

        A row holds one sequence between padding, or with `segment_ids` several behind one another.
        Each has the logits that the engine gives it.

        Args:
            positions: not read. Tokens count from 0 in their sequence, as they do in the engine.
            cache: None; the engine generates.
            attention_mask: true where token t sees token s. Its diagonal says which are padding.
            segment_ids: from 1 on, the sequence that each token is of; 0 is padding. Tunix gives
                them beside the mask, or alone where it packs sequences.

        Raises:
            ValueError: a cache was given.
        """
        if cache is not None:
            raise ValueError(
                "Policy keeps no cache: it reads whole sequences. Generate with EngineRollout, as "
                "ClusterConfig(rollout_engine=EngineRollout)"
            )
        if segment_ids is None and attention_mask is not None:
            segment_ids = jnp.diagonal(attention_mask, axis1=-2, axis2=-1).astype(jnp.int32)
        packed = {} if segment_ids is None else {"segment_ids": sorted_segments(segment_ids)}
        logits = self.decoder(input_tokens, **packed, saved=self.saved)
        return logits[..., : self.model.vocab_size], None


def sorted_segments(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Ids that do not decrease before the padding at the end, as the layers read them.

    Padding before a row's first sequence becomes a sequence that nothing else sees. Padding between
    tokens of a sequence is of that sequence: a model may have sampled the padding token.
    """
    places = jnp.arange(segment_ids.shape[1])
    last = jnp.max(jnp.where(segment_ids > 0, places, -1), axis=1, keepdims=True)
    filled = jax.lax.cummax(jnp.maximum(segment_ids, 0), axis=1) + 1
    return jnp.where(places <= last, filled, 0)
