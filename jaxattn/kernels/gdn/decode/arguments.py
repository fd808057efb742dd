"""The arguments of a decode call of `jaxattn.gdn` or `jaxattn.kda`, after the op has checked
them."""

import dataclasses

import jax

from jaxattn.arena import Arena
from jaxattn.core.dispatch import without_gradient
from jaxattn.kernels.gdn.decode.prologue import GdnDecodeConfig


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GdnDecodeCall:
    """The inputs of a step, and the pools of its states.

    Attributes:
        op: The public name, for messages.
        qkvz: [B, S, q | k | v | z], head after head; without `eps` there is no z.
        ba: [B, S, b | a], any float dtype.
        weights: float32 [A_log | dt_bias | norm | the convolution's taps [W, Dc]], or a stack of
            such rows. Without norm and convolution only the gates' part is read.
        conv_state: [L, Z, W - 1, Dc] with `layer`, or [Z, W - 1, Dc]; None: no convolution.
        state: [L, Z, Hv, Dv, Dk] with `layer`, or [Z, Hv, Dv, Dk].
        reads, writes: The slots of each row [B]; writes may be [B, S].
        affine: (a, b), for the layer `a * layer + b`.
        scale: The factor of the delta rule's output.
        l2norm: Whether q and k are normalized first.
        eps: The epsilon of the gated RMS norm; None: no norm.
        f: [B, S, Hv * Dk], from which the decays per channel are computed. Then `qkvz` has no z,
            `ba` no a, and `weights` begins with [A_log | dt_bias [Hv * Dk] | norm].
        z: [B, S, Hv * Dv], given together with f.
        lower_bound: The lower bound of such log decays, as in `jaxattn.kda.kda_gates`.
        halves: As in `gated_delta_net_decode`.
    """

    op: str
    qkvz: jax.Array
    ba: jax.Array
    weights: jax.Array
    state: jax.Array
    reads: jax.Array
    writes: jax.Array
    num_key_heads: int
    scale: float
    conv_state: jax.Array | None = None
    layer: jax.Array | int | None = None
    affine: tuple[int, int] = (1, 0)
    l2norm: bool = True
    eps: float | None = None
    f: jax.Array | None = None
    z: jax.Array | None = None
    lower_bound: float | None = None
    halves: bool = False
    arena: Arena | None = None

    @property
    def batch(self) -> int:
        return self.qkvz.shape[0]

    @property
    def q_len(self) -> int:
        return self.qkvz.shape[1]

    @property
    def num_value_heads(self) -> int:
        return self.state.shape[-3]

    def config(self) -> GdnDecodeConfig:
        return GdnDecodeConfig(
            q_len=self.q_len,
            key_heads=self.num_key_heads,
            value_heads=self.num_value_heads,
            conv=self.conv_state is not None,
            norm=self.eps is not None,
            l2norm=self.l2norm,
            stacked=self.weights.ndim == 2,
            keep=self.writes.ndim == 2,
            scale=self.scale,
            eps=self.eps or 0.0,
            channels=self.f is not None,
            lower_bound=self.lower_bound,
            halves=self.halves,
        )

    def without_gradient(self) -> "GdnDecodeCall":
        """Returns the same call; none of its operands has a gradient."""
        names = ("qkvz", "ba", "f", "z", "weights", "conv_state", "state")
        # In the op's terms: its layers have the projections in one array.
        said = {
            "gated_delta_rule_decode": "q/k/v a/b f z A_log/dt_bias conv_state state",
            "kda_decode": "q/k/v b f z A_log/dt_bias conv_state state",
            "kimi_delta_attention_decode": "qkv b f gate weights conv_state state",
        }.get(self.op, " ".join(names))
        held = without_gradient(
            self.op,
            tuple(getattr(self, name) for name in names),
            said,
            train_with="chunk_gated_delta_rule" if self.f is None else "chunk_kda",
        )
        return dataclasses.replace(self, **dict(zip(names, held, strict=True)))
