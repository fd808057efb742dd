"""The hybrid decoder: repeats of several GDN layers and one MLA layer, each with a gated MLP.

The model that ships with the package (`tiny/`) is of this kind, which is one `DecoderModel` of
many.
"""

import jax
import numpy as np
from flax import nnx

from jaxattn.models.blocks import GDN, MLA, MLP, Block, Stream
from jaxattn.models.embedded.hybrid_config import HybridConfig
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.network.decoder_spec import DecoderSpec


class Hybrid(DecoderModel):
    """The model of a `HybridConfig`."""

    config: HybridConfig

    def __init__(self, config: HybridConfig):
        if not isinstance(config, HybridConfig):
            raise TypeError(
                f"Hybrid: config must be a jaxattn.models.HybridConfig, got {type(config).__name__}"
            )
        super().__init__(decoder_spec(config))
        object.__setattr__(self, "config", config)


def decoder_spec(config: HybridConfig) -> DecoderSpec:
    """Returns the decoder's layers: `num_repeats` times (`gdn_per_repeat` x GDN, MLA)."""
    layers = config.num_repeats * (config.gdn_per_repeat + 1)
    mlp = MLP(intermediate_size=config.intermediate_size)
    delta = GDN(
        num_k_heads=config.linear_num_key_heads,
        num_v_heads=config.linear_num_value_heads,
        head_k_dim=config.linear_key_head_dim,
        head_v_dim=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
    )
    attention = MLA(
        num_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        rope=config.rope,
        cache_dtype=config.cache_dtype,
    )
    repeat = (Block(delta, mlp),) * config.gdn_per_repeat + (Block(attention, mlp),)
    return DecoderSpec(
        vocab_size=config.vocab_size,
        stream=Stream(
            hidden_size=config.hidden_size,
            eps=config.rms_norm_eps,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            out_init_scale=(2 * layers) ** -0.5,
        ),
        blocks=repeat * config.num_repeats,
        max_position_embeddings=config.max_position_embeddings,
        tie_embeddings=config.tie_embeddings,
    )


# --- names in the package's checkpoint format


def stored_shapes(config: HybridConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns a checkpoint's tensors by name, stacked over the configuration's repeats."""
    found = {}
    for key, leaf in nnx.to_flat_state(Hybrid(config).param_shapes()):
        for name, _, repeat in _places(config, key):
            shape = leaf.shape if repeat is None else (config.num_repeats, *leaf.shape[1:])
            found[name] = jax.ShapeDtypeStruct(shape, leaf.dtype)
    return found


def to_stored(config: HybridConfig, params: nnx.State) -> dict[str, np.ndarray]:
    """Converts the parameters to a checkpoint's tensors, on the host."""
    found: dict[str, dict[int, np.ndarray]] = {}
    for key, leaf in nnx.to_flat_state(params):
        array = np.asarray(leaf[...])
        for name, row, repeat in _places(config, key):
            found.setdefault(name, {})[row] = array if repeat is None else array[repeat]
    return {
        name: np.stack([rows[r] for r in sorted(rows)]) if name.startswith("repeats.") else rows[0]
        for name, rows in found.items()
    }


def from_stored(config: HybridConfig, tensors: dict[str, np.ndarray]) -> nnx.State:
    """Inverts `to_stored`: returns the parameters on the default device."""
    flat = []
    for key, leaf in nnx.to_flat_state(Hybrid(config).param_shapes()):
        places = _places(config, key)
        if places[0][2] is None:
            array = tensors[places[0][0]]
        else:
            array = np.stack([tensors[name][row] for name, row, _ in places])
        flat.append((key, leaf.replace(jax.numpy.asarray(array))))
    return nnx.from_flat_state(flat)


def _places(config: HybridConfig, key: tuple) -> list[tuple[str, int, int | None]]:
    """Returns a parameter's places in a checkpoint: (tensor, row of it, row of its own stack).

    The format stacks the configuration's pattern, whereas the decoder's segments may begin
    elsewhere.
    """
    if key[0] != "segments":
        return [(".".join(map(str, key)), 0, None)]
    _, number, _, place, *path = key
    segment = Hybrid(config).spec.segments[number]
    found: list[tuple[str, int, int | None]] = []
    for repeat in range(segment.repeats):
        layer = segment.first + repeat * len(segment.pattern) + place
        row, j = divmod(layer, config.gdn_per_repeat + 1)
        kind = "mla" if j == config.gdn_per_repeat else "gdn"
        inner = [kind, *path[1:]] if path[0] == "mixer" else path
        layer_name = "mla" if kind == "mla" else f"gdn.{j}"
        found.append((".".join(["repeats", layer_name, *map(str, inner)]), row, repeat))
    return found
