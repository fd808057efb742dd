"""Layers under `jax.grad`: in a scan with checkpoints, by kernels too, and over several devices."""

import collections
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn import nn
from jaxattn.core.dispatch import kernels_untraced, traced_for_hopper
from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.moe import Router
from tests.helpers.kernel_cases import slow
from tests.helpers.virtual_devices import on_virtual_devices

P = jax.P
HIDDEN, LAYERS = 64, 2
ROUTER = Router(experts=32, top_k=2, scores="softmax", normalize=True)
MODULES = {
    "GroupedQueryAttention": lambda **o: nn.GroupedQueryAttention(
        HIDDEN, 2, 1, 64, rope=RopeConfig(dim=16), gated=True, qk_norm=True, **o
    ),
    "MultiHeadLatentAttention": lambda **o: nn.MultiHeadLatentAttention(HIDDEN, 2, **o),
    "GatedDeltaNet": lambda **o: nn.GatedDeltaNet(HIDDEN, 1, 2, **o),
    "KimiDeltaAttention": lambda **o: nn.KimiDeltaAttention(HIDDEN, 1, **o),
    "MixtureOfExperts": lambda **o: nn.MixtureOfExperts(HIDDEN, 64, ROUTER, shared_size=64, **o),
}


def traced_gradient(make, policy):
    """The gradient of a scan over layers, traced for a Hopper GPU."""

    def layer(key):
        return nnx.split(make(rngs=nnx.Rngs(key)), nnx.Param, ...)

    definition = jax.eval_shape(lambda: layer(jax.random.key(0)))[0]
    stacks = jax.eval_shape(
        lambda: jax.vmap(lambda key: layer(key)[1:])(jax.random.split(jax.random.key(0), LAYERS))
    )

    def loss(params, rest, x):
        @functools.partial(jax.checkpoint, policy=policy)
        def turn(x, state):
            return x + nnx.merge(definition, *state)(x).astype(x.dtype), None

        return jnp.square(jax.lax.scan(turn, x, (params, rest))[0].astype(jnp.float32)).sum()

    x = jax.ShapeDtypeStruct((1, 128, HIDDEN), jnp.bfloat16)
    with traced_for_hopper(True), kernels_untraced(True):
        return jax.jit(jax.grad(loss, argnums=(0, 2))).trace(*stacks, x)


@pytest.mark.parametrize("name", MODULES)
def test_a_scan_of_checkpointed_layers_has_a_gradient(name):
    """JAX 0.11.2 fails where a body writes to references that depend on no layer's input."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a gradient that XLA computes warns
        traced = traced_gradient(MODULES[name], None)
    assert "mpmd_map" in str(traced.jaxpr)


def test_a_policy_keeps_what_the_experts_name():
    """Without it the backward pass runs the first product again."""
    policies = (None, jax.checkpoint_policies.save_only_these_names("moe_gate_up"))
    counts = []
    for policy in policies:
        with kernels_untraced(True):
            text = traced_gradient(MODULES["MixtureOfExperts"], policy).lower(
                lowering_platforms=("cuda",)
            )
        counts.append(collections.Counter(re.findall(r"(moe_\w+)_mosaic", text.as_text())))
    every, named = counts
    assert every["moe_gate_up"] == 2 and named["moe_gate_up"] == 1
    assert every["moe_down"] == named["moe_down"] == 1
    assert named["moe_gate_up_weights"] == named["moe_down_weights"] == 1


def test_a_policy_keeps_what_delta_layers_name():
    """Without it the backward pass runs the whole forward kernel again."""
    policies = (None, jax.checkpoint_policies.save_only_these_names("delta_out"))
    outputs = []
    for policy in policies:
        with kernels_untraced(True):
            text = traced_gradient(MODULES["GatedDeltaNet"], policy).lower(
                lowering_platforms=("cuda",)
            )
        outputs.append(text.as_text().count("gdn_prefill_output_mosaic"))
    assert outputs[1] < outputs[0]


def test_a_delta_layer_s_gated_norm_has_a_kernel_of_its_gradient():
    """It reads the gate in its projection, which nothing copies."""
    layer = jax.eval_shape(lambda: nn.GatedDeltaNet(HIDDEN * 2, 4, 8, rngs=nnx.Rngs(0)))
    definition, params, rest = nnx.split(layer, nnx.Param, ...)
    x = jax.ShapeDtypeStruct((1, 128, HIDDEN * 2), jnp.float32)

    def loss(params, rest, x):
        return jnp.square(nnx.merge(definition, params, rest)(x)).sum()

    with traced_for_hopper(True), kernels_untraced(True):
        traced = jax.jit(jax.grad(loss, argnums=(0, 2))).trace(params, rest, x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (launch,) = (line for line in text.splitlines() if "gated_norm_gradient_mosaic" in line)
    assert "tensor<128x24x128xbf16>" in launch  # all columns of the projection


# --- Over a mesh of two FSDP and two tensor devices


def halves(axis, parts=1):
    """A device's part of a parameter, which has `parts` equal pieces along an axis."""

    def split(x, size):
        shape = (*x.shape[:axis], parts, size, x.shape[axis] // parts // size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis + 1, 0).reshape(
            size, *x.shape[:axis], -1, *x.shape[axis + 1 :]
        )

    return split


def whole(x, size):
    return jnp.broadcast_to(x, (size, *x.shape))


# Of each module: whole, of one of two tensor devices, and how its parameters are divided.
DIVIDED = {
    "GroupedQueryAttention": (
        lambda **o: nn.GroupedQueryAttention(16, 4, 2, 8, rope=RopeConfig(dim=4), **o),
        lambda **o: nn.GroupedQueryAttention(16, 2, 1, 8, rope=RopeConfig(dim=4), **o),
        {"q_proj": halves(1), "k_proj": halves(1), "v_proj": halves(1), "o_proj": halves(0)},
    ),
    "GatedMLP": (
        lambda **o: nn.GatedMLP(16, 32, **o),
        lambda **o: nn.GatedMLP(16, 16, **o),
        {"gate_proj": halves(1), "up_proj": halves(1), "down_proj": halves(0)},
    ),
    "MixtureOfExperts": (
        lambda **o: nn.MixtureOfExperts(16, 8, ROUTER, **o),
        lambda **o: nn.MixtureOfExperts(16, 4, ROUTER, **o),
        {"gate_up_proj": halves(1, parts=2), "down_proj": halves(2)},
    ),
}


@pytest.mark.slow_cases(reason="heads of another device; found by columns of experts too")
@pytest.mark.parametrize(
    "name", [slow("GroupedQueryAttention"), slow("GatedMLP"), "MixtureOfExperts"]
)
@on_virtual_devices
def test_fsdp_and_tensor_devices_have_the_gradients_of_one(name):
    make, make_part, division = DIVIDED[name]
    options = {"dtype": jnp.float32, "rngs": nnx.Rngs(0)}
    definition, params = nnx.split(make(**options))
    of_part = nnx.split(make_part(**options))[0]
    x = jax.random.normal(jax.random.key(1), (4, 6, 16))
    target = jax.random.normal(jax.random.key(2), x.shape)
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), auto, devices=jax.devices()[:4])

    def alone(params, x):
        return (nnx.merge(definition, params)(x) * target).mean()

    def divided(params):
        def divide(path, value):
            names = [str(getattr(key, "key", key)) for key in path]
            split = next((f for key, f in division.items() if key in names), whole)
            return split(value, 2)

        return jax.tree.map_with_path(divide, params)

    def spec(x):
        """[tensor, ...], the last axis over the FSDP devices where they divide it."""
        fsdp = "data" if x.ndim > 2 and x.shape[-1] % 2 == 0 else None
        return P("tensor", *[None] * (x.ndim - 2), fsdp)

    def spread(params, x, *, checked):
        stacked = divided(params)
        specs = jax.tree.map(spec, stacked)

        def device(stacked, x, target):
            def gathered(value, spec):
                if "data" in spec:
                    value = jax.lax.all_gather(value, "data", axis=value.ndim - 1, tiled=True)
                return value[0]

            y = nnx.merge(of_part, jax.tree.map(gathered, stacked, specs))(x)
            total = (jax.lax.psum(y, "tensor") * target).mean()
            return jax.lax.pmean(total, "data")

        run = jax.shard_map(
            device, mesh=mesh, in_specs=(specs, P("data"), P("data")), out_specs=P(),
            check_vma=checked,
        )  # fmt: skip
        return run(stacked, x, target)

    wanted = jax.jit(jax.value_and_grad(alone, argnums=(0, 1)))(params, x)
    for checked in (True, False) if name == "GatedMLP" else (False,):  # as kernels need it
        found = jax.jit(
            jax.value_and_grad(functools.partial(spread, checked=checked), argnums=(0, 1))
        )(params, x)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), found, wanted
        )
