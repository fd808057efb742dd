"""Whole layers of PyTorch, forward and backward: FLA's delta nets, and experts of transformers.

The layers have Qwen3.5-35B's widths and the parts that a PyTorch user would take: FLA's
`GatedDeltaNet`, and transformers' MoE block. The experts' products are
`torch.nn.functional.grouped_mm`. This module sorts the tokens before and after them, because
transformers leaves the gradients of its gathers to PyTorch, which sorts and adds rows one after
another. Parameters and the residual stream are bfloat16.

With FlashQLA's rule, the delta net uses FLA's convolution, norms and gate, because FLA's own
backward pass refuses a Hopper GPU with Triton 3.4 to 3.7.0.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

HIDDEN, EXPERTS, TAKEN, WIDTH = 2048, 256, 8, 512
DEVICE = "cuda"


def torch() -> Any:
    return importlib.import_module("torch")


def flashqla_delta_net() -> Any:
    """FLA's layer with FlashQLA's rule; PyTorch computes the gates, FLA the norm of q and k."""
    module: Any = importlib.import_module("fla.layers.gated_deltanet")
    l2norm = importlib.import_module("fla.modules.l2norm").l2norm
    flash_qla, f = importlib.import_module("flash_qla"), torch().nn.functional

    def rule(
        q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, **rest: Any
    ) -> Any:
        del rest  # FLA's options for work that this function does itself
        decays = -A_log.float().exp() * f.softplus(g.float() + dt_bias.float())
        return flash_qla.chunk_gated_delta_rule(
            q=l2norm(q), k=l2norm(k), v=v, g=decays, beta=beta.float().sigmoid(),
            use_qk_l2norm_in_kernel=False,
        )  # fmt: skip

    module.chunk_gated_delta_rule = rule
    return delta_net()


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
    made = block.Qwen3_5MoeSparseMoeBlock(config)
    made.experts.forward = functools.partial(sorted_experts, made.experts)
    return made


@functools.cache
def permutations() -> tuple[Any, Any]:
    """Gathers of rows, whose gradients are gathers too."""
    t = torch()

    class ToExperts(t.autograd.Function):  # type: ignore[name-defined]
        """Gathers tokens [T, F] into rows [T K, F] in the order of their experts."""

        @staticmethod
        def forward(ctx: Any, x: Any, order: Any, places: Any, top_k: int) -> Any:
            ctx.save_for_backward(places)
            ctx.top_k = top_k
            return x.index_select(0, order // top_k)

        @staticmethod
        def backward(ctx: Any, of_rows: Any) -> Any:
            (places,) = ctx.saved_tensors
            of_pairs = of_rows.index_select(0, places).view(-1, ctx.top_k, of_rows.shape[1])
            return of_pairs.sum(1), None, None, None

    class ToTokens(t.autograd.Function):  # type: ignore[name-defined]
        """Gathers the experts' rows into pairs of token and expert, token after token."""

        @staticmethod
        def forward(ctx: Any, rows: Any, order: Any, places: Any) -> Any:
            ctx.save_for_backward(order)
            return rows.index_select(0, places)

        @staticmethod
        def backward(ctx: Any, of_pairs: Any) -> Any:
            return of_pairs.index_select(0, ctx.saved_tensors[0]), None, None

    return ToExperts, ToTokens


@functools.cache
def pointwise() -> tuple[Any, Any]:
    """The compiled functions between the products: the activation, and the sum per token."""
    t = torch()

    def activated(gate_up: Any) -> Any:
        gate, up = gate_up.chunk(2, dim=-1)
        return t.nn.functional.silu(gate) * up

    def summed(rows: Any, weights: Any) -> Any:
        return (rows * weights[..., None]).sum(1)

    return t.compile(activated), t.compile(summed)


def sorted_experts(module: Any, x: Any, ids: Any, weights: Any) -> Any:
    """Replaces the `forward` of transformers' experts."""
    t, top_k = torch(), ids.shape[1]
    to_experts, to_tokens = permutations()
    activated, summed = pointwise()
    _, order = t.sort(ids.reshape(-1), stable=True)
    places = t.empty_like(order)
    places[order] = t.arange(len(order), device=order.device)
    counts = t.histc(ids.int(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    ends = {"offs": t.cumsum(counts, 0, dtype=t.int32)}
    rows, product = to_experts.apply(x, order, places, top_k), t.nn.functional.grouped_mm
    gate_up = product(rows, module.gate_up_proj.transpose(1, 2), **ends)
    out = product(activated(gate_up), module.down_proj.transpose(1, 2), **ends)
    pairs = to_tokens.apply(out, order, places).view(-1, top_k, x.shape[1])
    return summed(pairs, weights)


def hybrid_layer(mixer: Callable[[], Any] = delta_net) -> Any:
    t, modules = torch(), importlib.import_module("fla.modules")

    class HybridLayer(t.nn.Module):  # type: ignore[name-defined]
        """A delta net and experts, each after a norm and with a residual."""

        def __init__(self) -> None:
            super().__init__()
            self.norms = t.nn.ModuleList([modules.RMSNorm(HIDDEN) for _ in range(2)])
            self.parts = t.nn.ModuleList([mixer(), experts()])

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


FLASHQLA_LAYERS: dict[str, Callable[[], Any]] = {
    "hybrid layer": functools.partial(hybrid_layer, flashqla_delta_net),
    "delta net": flashqla_delta_net,
}


def flashqla_layer_gradient(name: str, rows: int, tokens: int) -> Callable[[int], Any]:
    return layer_gradient(name, rows, tokens, FLASHQLA_LAYERS)


def layer_gradient(
    name: str, rows: int, tokens: int, layers: Mapping[str, Callable[[], Any]] = LAYERS
) -> Callable[[int], Any]:
    """Both passes of a layer of `bench/layers/gradients/layer_gradients.py`.

    The gradients are those of the input and of all parameters. The attribute `forward` of the
    returned function is only the forward pass.

    Raises:
        ValueError: PyTorch has no such layer here.
    """
    if name not in layers:
        raise ValueError(f"it does not support {name}")
    t = torch()
    t.manual_seed(0)
    with t.device(DEVICE):
        layer = layers[name]()
    layer.to(t.bfloat16)
    for parameter in layer.parameters():
        if parameter.dim() > 1:  # experts and routers start uninitialized
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
