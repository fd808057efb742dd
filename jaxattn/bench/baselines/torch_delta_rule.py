"""Delta rules of FLA, FlashQLA and FlashInfer, as their users call them, for torch_runner.py."""

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

from jaxattn.bench.baselines.torch_layers import DEVICE, torch
from jaxattn.bench.harness.timing import rotation

DIM = 128  # head dim of the delta rule's keys and values


def delta_rule(rows: int, tokens: int, key_heads: int, value_heads: int) -> dict[str, Any]:
    """q, k, v, g, beta like gdn_prefill's inputs, with gates log sigmoid(uniform)."""
    t = torch()
    normal = functools.partial(t.randn, dtype=t.bfloat16, device=DEVICE)
    uniform = functools.partial(t.rand, dtype=t.float32, device=DEVICE)
    return {
        "q": normal(rows, tokens, key_heads, DIM),
        "k": normal(rows, tokens, key_heads, DIM),
        "v": normal(rows, tokens, value_heads, DIM),
        "g": t.nn.functional.logsigmoid(uniform(rows, tokens, value_heads)),
        "beta": uniform(rows, tokens, value_heads),
    }


def fla_decode(
    batch: int, key_heads: int, value_heads: int, tokens: int, state: str
) -> Callable[[int], Any]:
    """FLA's recurrence only, without our op's convolution, gates and norm."""
    if state != "float32":
        raise ValueError(f"it supports only float32 states, not {state}")
    t, fla = torch(), importlib.import_module("fla.ops.gated_delta_rule")
    size = batch * value_heads * DIM * DIM * 4
    layers = rotation(size)
    states = t.randn(layers, batch, value_heads, DIM, DIM, dtype=t.float32, device=DEVICE)
    operands = delta_rule(batch, tokens, key_heads, value_heads)
    return lambda i: fla.fused_recurrent_gated_delta_rule(
        **operands,
        initial_state=states[i % layers],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


def prefill(key_heads: int, value_heads: int, count: int, length: int) -> dict[str, Any]:
    """Keyword arguments, with FLA's names, for a chunked prefill of packed sequences."""
    t = torch()
    return {
        **delta_rule(1, count * length, key_heads, value_heads),
        "cu_seqlens": t.tensor(
            [length * i for i in range(count + 1)], dtype=t.int64, device=DEVICE
        ),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


def fla_prefill(*shape: int) -> Callable[[int], Any]:
    os.environ["FLA_FLASH_QLA"] = "0"  # FLA's own kernels, even if FlashQLA is installed
    fla, operands = importlib.import_module("fla.ops.gated_delta_rule"), prefill(*shape)
    return lambda i: fla.chunk_gated_delta_rule(**operands)


def fla_kda_prefill(heads: int, count: int, length: int) -> Callable[[int], Any]:
    fla, operands = importlib.import_module("fla.ops.kda"), prefill(heads, heads, count, length)
    drawn = torch().rand(1, count * length, heads, DIM, dtype=torch().float32, device=DEVICE)
    operands |= {"g": torch().nn.functional.logsigmoid(drawn)}
    return lambda i: fla.chunk_kda(**operands)


def flashqla_prefill(*shape: int) -> Callable[[int], Any]:
    """FlashQLA on normalized q and k, because it leaves their norm to torch.compile."""
    flash_qla, operands = importlib.import_module("flash_qla"), prefill(*shape)
    normalize = torch().nn.functional.normalize
    operands |= {name: normalize(operands[name], dim=-1) for name in "qk"}
    operands["use_qk_l2norm_in_kernel"] = False
    return lambda i: flash_qla.chunk_gated_delta_rule(**operands)


def flashinfer_prefill(*shape: int) -> Callable[[int], Any]:
    """FlashInfer takes packed tokens without a batch axis, and the decay instead of its log."""
    module, operands = importlib.import_module("flashinfer.gdn_prefill"), prefill(*shape)
    packed = {name: operands[name][0] for name in ("q", "k", "v", "g", "beta")}
    operands |= packed | {"g": torch().exp(packed["g"])}
    return lambda i: module.chunk_gated_delta_rule(**operands)


def fla_gradient(op: str, rows: int, tokens: int) -> Callable[[int], Any]:
    """Both passes of FLA's own kernels, at shapes of bench/layers/gradients/op_gradients.py."""
    os.environ["FLA_FLASH_QLA"] = "0"
    if op == "kda":
        operands = delta_rule(rows, tokens, 16, 16)
        drawn = torch().rand(rows, tokens, 16, DIM, dtype=torch().float32, device=DEVICE)
        operands |= {"g": torch().nn.functional.logsigmoid(drawn)}
        return both_passes(importlib.import_module("fla.ops.kda").chunk_kda, operands)
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    return both_passes(rule, gradient_operands(op, rows, tokens))


def flashqla_gradient(op: str, rows: int, tokens: int) -> Callable[[int], Any]:
    """Both passes of FlashQLA on normalized q and k.

    The time does not include their norm, which FlashQLA leaves to torch.compile.
    """
    flash_qla, normalize = importlib.import_module("flash_qla"), torch().nn.functional.normalize
    operands = gradient_operands(op, rows, tokens)
    operands |= {name: normalize(operands[name], dim=-1) for name in "qk"}
    return both_passes(flash_qla.chunk_gated_delta_rule, operands, l2norm=False)


def gradient_operands(op: str, rows: int, tokens: int) -> dict[str, Any]:
    if op != "gdn":
        raise ValueError(f"it does not support {op}")
    return delta_rule(rows, tokens, 16, 32)


def both_passes(
    rule: Callable[..., Any], operands: dict[str, Any], *, l2norm: bool = True
) -> Callable[[int], Any]:
    """A call that returns the gradients of all operands, for a fixed cotangent of the output."""
    t = torch()
    operands = {name: x.requires_grad_() for name, x in operands.items()}
    cotangent = t.randn(*operands["v"].shape, dtype=t.bfloat16, device=DEVICE)

    def forward(i: int) -> Any:
        del i
        return rule(**operands, use_qk_l2norm_in_kernel=l2norm)[0]

    def call(i: int) -> Any:
        return t.autograd.grad(forward(i), list(operands.values()), cotangent)

    call.forward = forward  # type: ignore[attr-defined]
    return call
