"""The norm of a residual stream, fused for one token into the products that read it.

    stream = PendingNorm(x, added, norms, layer=l, eps=eps, dtype=bfloat16)
    q, kv = stream.linears((q_proj, kv_a_proj), layer=l)     norm(x + added) @ q_proj[l], ...
    x = stream.total                                         x + added

In a decode step of one token, the launch of a norm takes 2 us and reads almost nothing. The first
product of a layer therefore computes the norm while it loads its own weights
(hopper/reduce/rms_norm_prologue.py). If the kernel does not support this, the norm gets its own
launch (ops/linear/rms_norm.py).
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxattn.core.dispatch import Implementation, dispatch_kernel, without_gradient
from jaxattn.core.layer_index import LayerIndex, split_layer_index
from jaxattn.core.numerics.fp8_block_scaling import dequantize
from jaxattn.core.numerics.fp8_weight_layout import deinterleave_columns
from jaxattn.core.numerics.rms_norm import rms_norm
from jaxattn.kernels.hopper.reduce.rms_norm_prologue import RmsNormPrologueParams
from jaxattn.kernels.linear import fp8_linear
from jaxattn.kernels.linear.linear import OP, linears_mosaic, refusal_with_norm, sums_parts
from jaxattn.kernels.moe.combine import ExpertOutputs
from jaxattn.ops.linear.rms_norm import add_rms_norm_layer


class PendingNorm:
    """Tokens before their norm, which the first product that reads them may compute.

    `jnp.asarray` returns the normed tokens in `dtype`; one launch computes them for all callers.
    `total` is x + added, float32.

    Args:
        x: Residual stream, float32 [*T, F].
        added: Addend in x's shape, or the `ExpertOutputs` of one token's experts.
        norms: The norm weights of all layers, [N, F].
        layer: The norm's index in `norms`.
        eps: Epsilon of the norm.
        dtype: Dtype of the normed tokens.
        implementation: Implementation of the norm, and of the products that compute it.
    """

    def __init__(
        self,
        x: Float[Array, "*T F"],
        added: Float[Array, "*T F"] | ExpertOutputs,
        norms: Float[Array, "N F"],
        *,
        layer: LayerIndex,
        eps: float,
        dtype: DTypeLike,
        implementation: Implementation | None = None,
    ):
        self._x, self._added, self._norms, self._layer = x, added, norms, layer
        self._eps, self._implementation = eps, implementation
        self.shape, self.ndim, self.size, self.dtype = x.shape, x.ndim, x.size, jnp.dtype(dtype)
        self._total: Array | None = None

    @property
    def total(self) -> Float[Array, "*T F"]:
        """x + added, from the launch that computed the norm."""
        return self._normed[0] if self._total is None else self._total

    def __jax_array__(self) -> Float[Array, "*T F"]:
        return self._normed[1]

    @property
    def _sum(self) -> Float[Array, "*T F"]:
        """The addend as an array."""
        return array_of(self._added, self.shape)

    def before(
        self, layer: LayerIndex, give: bool = True, parts: bool = False
    ) -> tuple[Array, RmsNormPrologueParams] | None:
        """Returns (x [1, F], `RmsNormPrologueParams`) for a kernel that receives `layer`'s index.

        Returns None if no kernel can compute this norm. Such a kernel has no gradient.

        Args:
            give: Whether the kernel also returns the normed token.
            parts: Whether the kernel sums up `ExpertOutputs`.
        """
        fits = self._x.dtype == jnp.float32 and self.dtype == jnp.bfloat16
        same = layer.repeat is self._layer.repeat
        if not fits or not same or self.size != self.shape[-1] or self._implementation == "xla":
            return None
        shape, (_, affine, _) = (1, self.shape[-1]), split_layer_index(self._layer)
        added: Any = None
        if parts and isinstance(self._added, ExpertOutputs):
            added = self._added.parts
            operands = added.rows, added.positions, added.weights
            rows, positions, weights = without_gradient(OP, operands)
            added = dataclasses.replace(added, rows=rows, positions=positions, weights=weights)
        else:
            added = without_gradient(OP, self._sum.reshape(shape))
        x, norms = without_gradient(OP, (self._x.reshape(shape), self._norms))
        return x, RmsNormPrologueParams(
            added=added, weights=norms, affine=affine, eps=self._eps, gives=give
        )

    def set_normed(self, total: Array, normed: Array | None = None) -> None:
        """Stores the sum and the normed token that a kernel computed from `before`'s result."""
        self._total = total.reshape(self.shape)
        if normed is not None:
            self._normed = self._total, normed.reshape(self.shape)

    def serves(
        self, weights: Sequence[Array], layer: LayerIndex, scales: Sequence[Array] | None = None
    ) -> bool:
        """Returns whether one launch can compute the norm and the products with these weights."""
        if self.before(layer, parts=True) is None:
            return False
        if scales is not None:
            return fp8_linear.refusal_with_norm(self.shape[-1], weights) is None
        one = weights[0].dtype == self.dtype
        return one and refusal_with_norm(1, self.shape[-1], weights) is None

    def linears(
        self,
        weights: Sequence[Float[Array, "L F N"]] | Sequence[Float[Array, "L N F"]],
        *,
        layer: LayerIndex,
        out_dtypes: Sequence[DTypeLike],
        give: bool = False,
        scales: Sequence[Float[Array, "L N/128 F/128"]] | None = None,
        biases: Sequence[Float[Array, "L N"]] | None = None,
    ) -> tuple[Float[Array, "*T N"], ...]:
        """`linear_layer` of the normed token, if `serves`; `give` stores the normed token too.

        With `scales` it is `linear_fp8_layer`, for float8_e4m3fn weights [L, N, F] without
        `biases`. Only "xla" has a gradient.
        """
        first, affine, _ = split_layer_index(layer)
        dtypes = [jnp.dtype(each) for each in out_dtypes]
        added, sums = self._added, sums_parts if scales is None else fp8_linear.sums_parts
        parts = isinstance(added, ExpertOutputs) and sums(weights, added.weights.shape[1])
        before = self.before(layer, give, parts=parts)
        assert before is not None  # `serves` is True
        x, norm = before

        def kernel(interpret: bool) -> list[Array]:
            stacks = without_gradient(OP, list(weights))
            make: Any
            if scales is not None:
                of_weights = without_gradient(OP, list(scales))
                make = partial(fp8_linear.linears_fp8_mosaic, scales=of_weights)
            else:
                of_biases = None if biases is None else without_gradient(OP, list(biases))
                make = partial(linears_mosaic, biases=of_biases)
            return make(
                x, weights=stacks, layer=first, affine=affine, out_dtypes=dtypes, norm=norm,
                interpret=interpret,
            )  # fmt: skip

        def xla() -> list[Array]:
            total = (self._x + self._sum).reshape(x.shape)
            row = lax.dynamic_index_in_dim(self._norms, self._layer.index, keepdims=False)
            normed = rms_norm(total, row, self._eps).astype(self.dtype)
            here = partial(lax.dynamic_index_in_dim, index=layer.index, keepdims=False)
            product = partial(jnp.matmul, normed, preferred_element_type=jnp.float32)
            wide = [here(each) for each in weights]
            if scales is not None:
                pairs = zip(wide, scales, strict=True)
                wide = [
                    dequantize(deinterleave_columns(w), here(s), self.dtype).T for w, s in pairs
                ]
            ys = [product(w) for w in wide]
            for place, each in enumerate(biases or ()):
                ys[place] += here(each)[: ys[place].shape[-1]].astype(jnp.float32)
            return [*(y.astype(d) for y, d in zip(ys, dtypes, strict=True)), total, normed]

        with jax.named_scope("norm_linear_layer"):
            found = dispatch_kernel(OP, self._implementation, kernel, xla)
        *products, total = found[: len(weights) + 1]
        self.set_normed(total, found[-1] if give else None)
        return tuple(y.reshape(*self.shape[:-1], y.shape[-1]) for y in products)

    @cached_property
    def _normed(self) -> tuple[Array, Array]:
        return add_rms_norm_layer(
            self._x, self._sum, self._norms, layer=self._layer, eps=self._eps, dtype=self.dtype,
            implementation=self._implementation,
        )  # fmt: skip


def array_of(added: Any, shape: tuple[int, ...]) -> Array:
    """Returns an array as it is, or sums `ExpertOutputs` in a separate launch, in this shape."""
    return added.total.reshape(shape) if isinstance(added, ExpertOutputs) else added


def tokens_of(x: Any) -> Array:
    """Returns the normed tokens of a `PendingNorm`, or x if it is an array."""
    return x.__jax_array__() if isinstance(x, PendingNorm) else x
