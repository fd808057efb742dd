"""Parameters as the hybrid decoder's steps like them: small ones together, once, on loading."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxattn.ops.gdn.layer import pack_gdn_weights
from jaxattn.ops.mla.append import pack_mla_weights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedParams:
    """Parameters as the steps like them, see `pack_vectors`.

    Attributes:
        params: the decoder's, with empty arrays in place of its repeats' vectors.
        vectors: float32 [num_repeats, total], all vectors of a repeat in one row.
        gdn_weights: float32 [L_gdn, P], see `jaxattn.gdn.pack_gdn_weights`; decoding reads
            them from the stack. None without delta-net layers.
        mla_weights: float32 [L_mla, W], likewise, see `jaxattn.mla.pack_mla_weights`.
        norm_weights: float32 [2 L, hidden], likewise: in the order of the layers, the norm before
            the attention or delta net, then the norm before the MLP.
    """

    params: nnx.State
    vectors: Float[Array, "repeats total"]
    gdn_weights: Float[Array, "L P"] | None
    mla_weights: Float[Array, "L W"]
    norm_weights: Float[Array, "N hidden"]

    @property
    def copies(self) -> tuple[Any, ...]:
        """What is there twice, so that decoding can read it from a stack."""
        return self.gdn_weights, self.mla_weights, self.norm_weights


def pack_vectors(params: nnx.State | PackedParams) -> PackedParams:
    """Puts every vector of the repeats (norms, gates) into one array. Do it once, on loading.

    Inside the layer loop XLA copies each vector out of its stack by a kernel of its own; one row is
    one copy. What decoding's kernels read is packed a layer at a time as well, W Dc floats more for
    a delta-net layer; prefill reads it where it was. The steps take the parameters packed or not,
    and compute the same.
    """
    if isinstance(params, PackedParams):
        return params
    leaves = jax.tree.leaves(params["repeats"])
    vectors = [leaf.astype(jnp.float32) for leaf in leaves if leaf.ndim == 2]
    empty = jax.tree.map(lambda leaf: leaf[:, :0] if leaf.ndim == 2 else leaf, params["repeats"])
    rest = nnx.State({**params, "repeats": empty})
    repeats = params["repeats"]
    return PackedParams(
        rest,
        jnp.concatenate(vectors, axis=1),
        _gdn_weights(repeats),
        _mla_weights(repeats),
        _norm_weights(repeats),
    )


def _gdn_weights(repeats: nnx.State) -> Array | None:
    layers: Any = repeats.get("gdn", {})
    if not layers:
        return None
    of_layer = [
        pack_gdn_weights(
            gdn["A_log"][...], gdn["dt_bias"][...], gdn["norm"]["weight"][...], gdn["conv1d"][...]
        )
        for gdn in (layers[j]["gdn"] for j in sorted(layers))
    ]
    return jnp.stack(of_layer, axis=1).reshape(-1, of_layer[0].shape[-1])


def _mla_weights(repeats: Any) -> Array:
    layer = repeats["mla"]["mla"]
    kv_norm = layer["kv_a_norm"]["weight"][...]
    q_norm = layer["q_a_norm"]["weight"][...] if "q_a_norm" in layer else None
    rope_dim = layer["kv_a_proj"]["weight"].shape[-1] - kv_norm.shape[-1]
    return pack_mla_weights(kv_norm, q_norm, rope_dim=rope_dim)


def _norm_weights(repeats: Any) -> Array:
    layers: Any = repeats.get("gdn", {})
    layers = [*(layers[j] for j in sorted(layers)), repeats["mla"]]
    norms = [layer[norm]["weight"][...] for layer in layers for norm in ("norm", "mlp_norm")]
    return jnp.stack(norms, axis=1).reshape(-1, norms[0].shape[-1]).astype(jnp.float32)
