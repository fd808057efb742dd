"""Whole layers of PyTorch, forward and backward: FLA's delta nets, and experts of transformers.

A layer of Qwen3.5-35B's widths as a PyTorch user puts it together: FLA's `GatedDeltaNet`, or
attention by `scaled_dot_product_attention`, and transformers' experts, whose products are
`torch.nn.functional.grouped_mm`. Parameters and the stream are bfloat16.
"""

import importlib
from collections.abc import Callable
from typing import Any

HIDDEN, EXPERTS, TAKEN, WIDTH = 2048, 256, 8, 512
DEVICE = "cuda"


def torch() -> Any:
    return importlib.import_module("torch")


def delta_net() -> Any:
    fla = importlib.import_module("fla.layers")
    return fla.GatedDeltaNet(
        hidden_size=HIDDEN, expand_v=1, head_dim=128, num_heads=16, num_v_heads=32, mode="chunk",
        use_gate=True, use_short_conv=True, conv_size=4, layer_idx=0,
    )  # fmt: skip


def experts() -> Any:
    qwen = importlib.import_module("transformers.models.qwen3_5_moe")
    config = qwen.Qwen3_5MoeTextConfig(
        hidden_size=HIDDEN, moe_intermediate_size=WIDTH, shared_expert_intermediate_size=WIDTH,
        num_experts=EXPERTS, num_experts_per_tok=TAKEN,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    block = importlib.import_module("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe")
    return block.Qwen3_5MoeSparseMoeBlock(config)


def hybrid_layer() -> Any:
    t, modules = torch(), importlib.import_module("fla.modules")

    class HybridLayer(t.nn.Module):  # type: ignore[name-defined]
        """A delta net and experts, each behind a norm and added to the stream."""

        def __init__(self) -> None:
            super().__init__()
            self.norms = t.nn.ModuleList([modules.RMSNorm(HIDDEN) for _ in range(2)])
            self.parts = t.nn.ModuleList([delta_net(), experts()])

        def forward(self, x: Any) -> Any:
            for norm, part in zip(self.norms, self.parts, strict=True):
                y = part(norm(x))
                x = x + (y[0] if isinstance(y, tuple) else y)
            return x

    return HybridLayer()


LAYERS: dict[str, Callable[[], Any]] = {
    "hybrid layer": hybrid_layer,
    "delta net": delta_net,
    "experts layer": experts,
}


def layer_gradient(name: str, rows: int, tokens: int) -> Callable[[int], Any]:
    """Both passes of a layer of `bench/layers/gradients/layer_gradients.py`, with gradients of the
    input and of all parameters; `forward` of what is returned is the forward pass alone.

    Raises:
        ValueError: PyTorch has no such layer here.
    """
    if name not in LAYERS:
        raise ValueError(f"it has no {name}")
    t = torch()
    t.manual_seed(0)
    with t.device(DEVICE):
        layer = LAYERS[name]()
    layer.to(t.bfloat16)
    for parameter in layer.parameters():
        if parameter.dim() > 1:  # experts and routers begin uninitialized
            t.nn.init.normal_(parameter, std=HIDDEN**-0.5)
    parameters = list(layer.parameters())
    shape = rows, tokens, HIDDEN
    x = t.randn(*shape, dtype=t.bfloat16, device=DEVICE, requires_grad=True)
    cotangent = t.randn(*shape, dtype=t.bfloat16, device=DEVICE)

    def forward(i: int) -> Any:
        del i
        y = layer(x)
        return y[0] if isinstance(y, tuple) else y

    def call(i: int) -> Any:
        return t.autograd.grad(forward(i), [x, *parameters], cotangent)

    call.forward = forward  # type: ignore[attr-defined]
    return call
