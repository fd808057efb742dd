"""On a Hopper GPU no gradient falls back to XLA unsaid, and what has none names its argument."""

import functools
import unittest.mock
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gdn, gqa, kda, mla, moe
from jaxattn.core.dispatch import kernels_untraced, traced_for_hopper
from jaxattn.core.numerics.fp8_block_scaling import quantize
from jaxattn.ops.gdn.gated_norm import gated_norm_of_sequences
from jaxattn.ops.gdn.packed_conv1d import causal_conv1d_of_segments
from tests.helpers import every_kernel
from tests.helpers.every_kernel import on_hopper

bf16 = jnp.bfloat16


def zeros(*shape, dtype=bf16):
    return jnp.zeros(shape, dtype)


def attention(dim, values=None, dtype=bf16):
    q = zeros(1, 8, 2, dim, dtype=dtype)
    return [q, q, zeros(1, 8, 2, values or dim, dtype=dtype)]


def delta(dim, channels=False, dtype=bf16):
    tokens = [zeros(1, 8, 2, dim, dtype=dtype)] * 3
    g = zeros(1, 8, 2, *([dim] if channels else []), dtype=jnp.float32)
    return [*tokens, g, zeros(1, 8, 2, dtype=jnp.float32)]


def experts(width, dtype=bf16):
    weights = zeros(2, 2 * width, 64, dtype=dtype), zeros(2, 64, width, dtype=dtype)
    return [zeros(8, 64, dtype=dtype), zeros(8, 1, dtype=jnp.int32), zeros(8, 1), *weights]


def quantized_experts():
    x, ids, shares, gate_up, down = experts(128)
    x, gate_up, down = (jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, 64)]) for a in (x, gate_up, down))
    down = zeros(2, 128, 128)
    (gate_up, up_scale), (down, down_scale) = quantize(gate_up), quantize(down)
    scales = {"gate_up_scale": up_scale.reshape(2, 2, 1, 1), "down_scale": down_scale}
    return [x, ids, shares, gate_up, down], scales


def causal(q, k, v, **options):
    return mla.causal_attention(q, k, v, scale=1.0, **options)


# What is called, its operands, and what the warning says.
REFUSED = {
    "causal_attention of 96 dims": (causal, attention(96), "96"),
    "causal_attention in float32": (causal, attention(192, 128, jnp.float32), "float32"),
    "gqa_attention of 96 dims": (gqa.gqa_attention, attention(96), "96"),
    "gqa_attention in float32": (gqa.gqa_attention, attention(128, dtype=jnp.float32), "float32"),
    "chunk_gated_delta_rule of 64 dims": (gdn.chunk_gated_delta_rule, delta(64), "64"),
    "chunk_gated_delta_rule in float32": (
        gdn.chunk_gated_delta_rule, delta(128, dtype=jnp.float32), "float32",
    ),
    "chunk_kda of 64 dims": (kda.chunk_kda, delta(64, channels=True), "64"),
    "mixture_of_experts of 72 columns": (moe.mixture_of_experts, experts(72), "72"),
    "mixture_of_experts in float32": (
        moe.mixture_of_experts, experts(64, jnp.float32), "float32",
    ),
}  # fmt: skip


def gpu_by_default():
    """Forward ops warn on a GPU only, and not where a plan traces what a GPU would run."""
    return unittest.mock.patch.object(jax, "default_backend", lambda: "gpu")


def warnings_of(op, operands, of=0, calls=1):
    """What is said, with Python's own filter, of the gradient of an operand."""

    def loss(x):
        out = jax.tree.leaves(op(*operands[:of], x, *operands[of + 1 :]))[0]
        return out.astype(jnp.float32).sum()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(calls):
            with traced_for_hopper(True), kernels_untraced(True), gpu_by_default():
                jax.eval_shape(jax.grad(loss), operands[of])
    return [str(each.message) for each in caught if each.category is UserWarning]


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_kernel_refuses_is_said_once(case):
    op, operands, reason = REFUSED[case]
    (said,) = warnings_of(op, operands, calls=2)
    name = case.partition(" ")[0]
    assert said.startswith(f"{name}: 'xla' runs instead of the GPU's kernel: {name}: ")
    assert reason in said


def test_a_forward_kernel_without_a_backward_one_is_said():
    operands, scales = quantized_experts()
    (said,) = warnings_of(lambda *args: moe.mixture_of_experts(*args, **scales), operands, calls=2)
    assert said == (
        "XLA computes the gradient: mixture_of_experts: the kernels have no gradient with "
        "quantized weights"
    )


@pytest.mark.parametrize(("channels", "taps", "count"), [(128, 3, 1), (192, 4, 1), (128, 4, 0)])
def test_a_convolution_without_a_kernel_of_its_gradient_is_said(channels, taps, count):
    operands = [zeros(1, 8, channels), zeros(channels, taps)]
    convolved = lambda x, weight: causal_conv1d_of_segments(x, weight, None, (channels,))[0]  # noqa: E731
    said = warnings_of(convolved, operands, calls=2)
    assert len(said) == count
    assert all(each.startswith("XLA computes the gradient: causal_conv1d: ") for each in said)


@pytest.mark.parametrize(("dim", "count"), [(64, 1), (128, 0)])
def test_a_gated_norm_without_a_kernel_of_its_gradient_is_said(dim, count):
    norm = functools.partial(gated_norm_of_sequences, eps=1e-6)
    operands = [zeros(1, 8, 2, dim), zeros(1, 8, 2 * dim), zeros(dim)]
    said = warnings_of(norm, operands, calls=2)
    assert len(said) == count
    assert all(each.startswith("XLA computes the gradient: gated_rms_norm: ") for each in said)


@pytest.mark.parametrize(
    ("op", "operands"),
    [
        (causal, attention(192, 128)),
        (gqa.gqa_attention, attention(64)),
        (gdn.chunk_gated_delta_rule, delta(128)),
        (moe.mixture_of_experts, experts(64)),
    ],
)
def test_what_kernels_differentiate_says_nothing(op, operands):
    assert not warnings_of(op, operands)


@pytest.mark.parametrize(
    ("op", "operands"),
    [
        (causal, attention(192, 128)),
        (gqa.gqa_attention, attention(64)),
        (gdn.chunk_gated_delta_rule, delta(128)),
        (kda.chunk_kda, delta(128, channels=True)),
        (moe.mixture_of_experts, experts(64)),
    ],
)
def test_a_second_gradient_is_refused_by_name(op, operands):
    def loss(x):
        return jnp.square(jax.tree.leaves(op(x, *operands[1:]))[0].astype(jnp.float32)).sum()

    name = "causal_attention" if op is causal else op.__name__
    said = f"{name}: the kernel has no gradient; pass implementation='xla' to differentiate"
    with on_hopper(), kernels_untraced(True), pytest.raises(NotImplementedError, match=said):
        jax.eval_shape(jax.grad(lambda x: jax.grad(loss)(x).astype(jnp.float32).sum()), operands[0])


# An argument of each op without a gradient, and the op that has one.
DECODE = {
    "mla_decode": ("q", "causal_attention"),
    "mla_append": ("kv", "causal_attention"),
    "gqa_decode": ("kv_cache", "gqa_attention"),
    "gqa_append": ("k", "gqa_attention"),
    "turbo_append": ("v", "gqa_attention"),
    "gated_delta_rule_decode": ("state", "chunk_gated_delta_rule"),
    "gated_delta_net_decode": ("qkvz", "chunk_gated_delta_rule"),
    "gated_delta_rule_prefill": ("k", "chunk_gated_delta_rule"),
    "kda_decode": ("state", "chunk_kda"),
    "kimi_delta_attention_decode": ("gate", "chunk_kda"),
    "kda_prefill": ("v", "chunk_kda"),
    "rms_norm_layer": ("x", "nn.RMSNorm"),
}


@pytest.mark.parametrize(
    ("name", "transform"), [*((name, "grad") for name in DECODE), ("mla_decode", "jvp")]
)
def test_a_decode_op_s_gradient_names_its_argument_and_what_to_use(name, transform):
    argument, instead = DECODE[name]
    arrays, rest = every_kernel.arguments(name)

    def loss(x):
        outs = jax.tree.leaves(every_kernel.OPS[name](**(arrays | {argument: x}), **rest))
        return sum(
            out.astype(jnp.float32).sum() for out in outs if jnp.issubdtype(out.dtype, jnp.floating)
        )

    def run(x):
        return jax.grad(loss)(x) if transform == "grad" else jax.jvp(loss, (x,), (x,))

    said = (
        f"^{name}: the kernel has no gradient of {argument}; train with {instead}, or pass "
        "implementation='xla' to differentiate"
    )
    with on_hopper(), kernels_untraced(True), pytest.raises(NotImplementedError, match=said):
        jax.eval_shape(run, arrays[argument])


def test_sinks_of_attention_to_lists_are_refused_by_name():
    pages = jnp.zeros((2, 64, 576), jnp.bfloat16)
    q, rows = jnp.zeros((1, 1, 8, 576), jnp.bfloat16), jnp.ones(1, jnp.int32)
    chosen = jnp.zeros((1, 1, 64), jnp.int32)

    def loss(sinks):
        return mla.mla_sparse_decode(q, pages, rows[:, None], rows, chosen, scale=0.1, sinks=sinks)[
            1
        ].sum()

    said = "^mla_sparse_decode: the kernel has no gradient of sinks"
    with on_hopper(), kernels_untraced(True), pytest.raises(NotImplementedError, match=said):
        jax.eval_shape(jax.grad(loss), jnp.zeros(8))


def test_ids_of_another_length_or_order_are_named():
    ids = np.array([[0, 1, 0, 0, 0, 0, 0, 0]])
    for op in (causal, gqa.gqa_attention):
        with pytest.raises(ValueError, match="segment_ids must not decrease"):
            op(*attention(64), segment_ids=ids)
        with pytest.raises(ValueError, match=r"segment_ids .*\(1, 7\)"):
            op(*attention(64), segment_ids=ids[:, 1:])
