"""Grouped options of `gated_delta_rule_prefill`: checkpoints, and the norm of its output."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxattn.core.cache.state_pool import write_slots
from jaxattn.core.validation.array_checks import (
    check_integer,
    check_integers,
    finite,
    floats,
    keep_concrete,
)
from jaxattn.kernels.gdn.prefill.inter_chunk.norm_epilogue import NormEpilogueParams


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Slots that receive each sequence's state after every `tokens` tokens.

    The slots hold states of the recurrence only. The caller already has the convolution's state,
    its last W - 1 inputs. For a checkpoint before token `end`, this state is
    `x[:, end - (W - 1) : end]` of `causal_conv1d`'s input `x`.

    Attributes:
        slots: `slots[i, j]` receives sequence i's state after `(j + 1) * tokens` tokens. -1 stores
            nothing, and entries past a sequence's end are ignored. The rules of `write_indices`
            hold for these slots and those of `write_indices` together.
        tokens: Distance of the checkpoints, a multiple of chunk_size, counted from each sequence's
            first token in the call. If a prompt comes in parts, make each part a multiple of
            `tokens` too.
    """

    slots: Int[Array, "n M"]
    tokens: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputNorm:
    """The gated norm `o / rms(o) * weight * silu(z)` over Dv in float32, as in Qwen3-Next.

    Kimi's rule, `jaxattn.kda`, uses sigmoid(z) instead of silu(z).

    Attributes:
        gate: An array with z in its last Hv * Dv columns, head after head. You can pass the packed
            projection `q | k | v | z` with N = Dc + Hv * Dv.
        weight: Weight of the norm.
        eps: Number added to the mean square.
    """

    gate: Float[Array, "B T N"]
    weight: Float[Array, " Dv"]
    eps: float = dataclasses.field(default=1e-6, metadata={"static": True})


def check_output_norm(op: str, norm: Any, v: Array, *, sigmoid: bool) -> NormEpilogueParams | None:
    """Returns the kernel's form of an `OutputNorm`; raises unless it fits v, [B, T, Hv, Dv]."""
    if norm is None:
        return None
    if not isinstance(norm, OutputNorm):
        raise TypeError(f"{op}: output_norm must be an OutputNorm, got {type(norm).__name__}")
    names = {"output_norm.gate": norm.gate, "output_norm.weight": norm.weight}
    gate, weight = floats(op, **names)
    tokens, columns, width = v.shape[:2], v.shape[2] * v.shape[3], v.shape[3]
    if gate.ndim != 3 or gate.shape[:2] != tokens or gate.shape[2] < columns:
        raise ValueError(
            f"{op}: output_norm.gate must be [{tokens[0]}, {tokens[1]}, N] with N at least "
            f"Hv * Dv = {columns}, got {list(gate.shape)}"
        )
    if weight.shape != (width,):
        raise ValueError(f"{op}: output_norm.weight must be [{width}], got {list(weight.shape)}")
    eps = finite(op, "output_norm.eps", norm.eps)
    gate = gate.reshape(v.shape[0] * v.shape[1], gate.shape[2])
    return NormEpilogueParams(gate, weight.astype(jnp.float32), eps, sigmoid)


def check_checkpoints(op: str, checkpoints: Any, count: int, chunk_size: int) -> Any:
    """Returns checked checkpoints of `count` sequences, or None if they have no slots.

    The slots stay NumPy arrays if they are concrete (`keep_concrete`).

    Raises:
        TypeError, ValueError: `checkpoints` has a wrong type, or a field does not fit; the message
            names it.
    """
    if checkpoints is None:
        return None
    if not isinstance(checkpoints, Checkpoints):
        raise TypeError(
            f"{op}: checkpoints must be a Checkpoints, got {type(checkpoints).__name__}"
        )
    tokens = checkpoints.tokens
    check_integer(op, "checkpoints.tokens", tokens)
    if tokens <= 0 or tokens % chunk_size:
        raise ValueError(
            f"{op}: checkpoints.tokens must be a positive multiple of {chunk_size=}, got {tokens}"
        )
    slots = keep_concrete(checkpoints.slots)
    fits = slots.ndim == 2 and slots.shape[0] == count
    check_integers(op, "checkpoints.slots", slots, f"[{count}, M]", fits=fits)
    return Checkpoints(slots=slots, tokens=tokens) if slots.shape[1] else None


def check_writes(
    op: str,
    state: Array,
    reads: Array,
    writes: Array | None,
    layer: int | Array | None,
    checkpoint_slots: Array | None,
) -> Array:
    """Returns the final states' slots; raises if they or the checkpoints' slots do not fit."""
    count = reads.shape[0]
    if writes is not None:
        fits = writes.shape == (count,)
        check_integers(op, "write_indices", writes, f"[{count}]", fits=fits)
    finals = write_slots(op, state, reads, writes, layer, 1)
    if checkpoint_slots is None or isinstance(checkpoint_slots, jax.core.Tracer):
        return finals
    # Cast to one dtype, because NumPy promotes uint64 with int64 to float64.
    all_slots: Any = np.asarray(checkpoint_slots).astype(np.int64)
    name = "checkpoints.slots"
    if not isinstance(finals, jax.core.Tracer):
        all_slots = np.concatenate(
            [np.asarray(finals).astype(np.int64)[:, None], all_slots], axis=1
        )
        name = f"write_indices and {name}, side by side,"
    write_slots(op, state, reads, all_slots, layer, all_slots.shape[1], name=name)
    return finals
