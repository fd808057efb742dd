"""The gradient of a delta rule's gated RMS norm, in one pass over its outputs and gates.

    n = o / rms(o)
    y = n weight s(z)                             s: SiLU or the sigmoid
    of_z = of_y n weight s'(z)
    of_o = (g - n mean(g n)) / rms(o)             g = of_y weight s(z)
    of_weight = sum of of_y s(z) n

The kernel recomputes rms(o), so the backward pass needs only the inputs of the forward pass. z may
be the last columns of a wider projection, which the kernel reads where they lie: XLA would copy
them.

A CTA has eight heads of some tokens. Half a warp has a row of 128 values, eight per thread, and the
two sums over a row take four shuffles each. A thread adds up its part of of_weight in registers.
CTAs write these sums, which XLA adds up in a fixed order.

Limits: heads of 128 dims; float32, bfloat16 or float16. XLA computes the rest.
Reference: `jaxattn.ops.gdn.gated_norm`; tests: tests/ops/gdn/test_gated_norm.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import NUM_SMS, require_hopper
from jaxattn.kernels.hopper.silu import sigmoid_and_slope

OP = "gated_rms_norm"
DIM, HEADS = 128, 8  # dims of a head, and heads that a CTA has at a time
CTAS, AHEAD = 4 * NUM_SMS, 2  # the most CTAs, and the tokens that a CTA loads ahead
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
TILE = plgpu.Layout.TILED(
    plgpu.Tiling(((HEADS, DIM), (2, DIM), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


def gated_norm_gradient(
    o: jax.Array,
    gate: jax.Array,
    weight: jax.Array,
    of_y: jax.Array,
    *,
    eps: float,
    sigmoid: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (of_o [N, H, D] in o's dtype, of_z [N, H, D] in gate's, of_weight float32 [D]).

    Args:
        o: [N, H, D].
        gate: [N, C], with z in its last H * D columns, head after head.
        weight: [D].
        of_y: The gradient of the result, [N, H, D].
        sigmoid: Whether the factor is sigmoid(z) instead of SiLU(z).
    """
    require_hopper(OP, interpret=interpret)
    tokens, heads, dim = o.shape
    served = all(each.dtype in DTYPES for each in (o, gate, weight))
    if dim != DIM or not served or o.size == 0:
        raise Refusal(
            f"{OP}: the gradient kernel needs heads of {DIM} dims in float32, bfloat16 or float16, "
            f"and at least one token; got {o.dtype} {o.shape} with a gate in {gate.dtype}"
        )
    shape, of_y = o.shape, of_y.astype(o.dtype)
    first = gate.shape[1] - heads * dim
    if heads % HEADS or first % dim:
        z = gate[:, first:]
        given = ((o, 1.0), (of_y, 0.0), (z, 0.0))
        o, of_y, z = (_in_groups(each.reshape(-1, dim), padding) for each, padding in given)
    else:
        z = gate.reshape(tokens, -1, dim)
    (count, groups), first = (len(o), o.shape[1] // HEADS), z.shape[1] - o.shape[1]
    blocks = min(count, max(1, CTAS // groups))
    out = launch(
        functools.partial(gradient_of_heads, eps, sigmoid, first),
        name="gated_norm_gradient",
        grid={"block": blocks, "group": groups},
        inputs={"o": o, "z": z, "of_y": of_y, "weight": weight},
        outputs={"of_o": jax.ShapeDtypeStruct(o.shape, o.dtype),
                 "of_z": jax.ShapeDtypeStruct(o.shape, z.dtype),
                 "of_weight": jax.ShapeDtypeStruct((blocks, groups, HEADS, DIM), jnp.float32)},
        warpgroups=None,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True,
            unsafe_no_auto_barriers=True,  # no thread reads what another has written
        ),
        interpret=interpret,
    )  # fmt: skip
    rows = shape[0] * shape[1]
    of_o, of_z = (out[name].reshape(-1, dim)[:rows].reshape(shape) for name in ("of_o", "of_z"))
    return of_o, of_z, out["of_weight"].sum(axis=(0, 1, 2))


def _in_groups(rows: jax.Array, padding: float) -> jax.Array:
    """Returns rows as tokens of `HEADS` heads.

    Padding has the gradients 0: it is 0 in of_y, and its norm is finite for every eps.
    """
    rows = jnp.pad(rows, ((0, -len(rows) % HEADS), (0, 0)), constant_values=padding)
    return rows.reshape(-1, HEADS, rows.shape[1])


def gradient_of_heads(
    eps: float,
    sigmoid: bool,
    first: int,
    o: Any,
    z: Any,
    of_y: Any,
    weight: Any,
    of_o: Any,
    of_z: Any,
    of_weight: Any,
) -> None:
    """The gradient for eight heads of some tokens; z begins at head `first` of its rows."""
    count, blocks = o.shape[0], of_weight.shape[0]
    block, group = lax.axis_index("block"), lax.axis_index("group")
    each = -(-count // blocks)
    begin = block * each
    end = jnp.minimum(begin + each, count)
    head = pl.multiple_of(group * HEADS, HEADS)
    wide = lambda numbers: numbers.astype(jnp.float32)  # noqa: E731

    def read(ref: Any, token: Any, head: Any) -> jax.Array:
        return plgpu.load(ref.at[token, pl.ds(head, HEADS)], layout=TILE, optimized=False)

    def widened(numbers: jax.Array, axis: int) -> jax.Array:
        tile = lax.broadcast_in_dim(numbers, (HEADS, DIM), (axis,))
        return plgpu.layout_cast(tile, TILE)

    def mean(numbers: jax.Array) -> jax.Array:
        return jnp.sum(numbers, axis=1) * (1 / DIM)

    factors = plgpu.load(weight, layout=TILE.reduce(0), optimized=False)
    factors = widened(wide(factors), 1)

    def one(token: Any, outputs: jax.Array, gates: jax.Array, given: jax.Array) -> jax.Array:
        """Writes of_o and of_z, and returns the addend of of_weight."""
        outputs, gates, given = wide(outputs), wide(gates), wide(given)
        opened, slope = sigmoid_and_slope(gates)
        factor = opened if sigmoid else opened * gates
        slope = opened * (1 - opened) if sigmoid else slope
        through = given * factor
        of_normed = through * factors
        inverse = widened(lax.rsqrt(mean(outputs * outputs) + eps), 0)
        normed = outputs * inverse
        share = widened(mean(of_normed * normed), 0)
        here = pl.ds(head, HEADS)
        of_outputs = inverse * (of_normed - normed * share)
        of_o.at[token, here][...] = of_outputs.astype(of_o.dtype)
        of_z.at[token, here][...] = (given * normed * factors * slope).astype(of_z.dtype)
        return through * normed

    def loaded(token: Any) -> tuple[jax.Array, ...]:
        token = jnp.minimum(token, count - 1)
        return read(o, token, head), read(z, token, first + head), read(of_y, token, head)

    def step(token: Any, carry: Any) -> Any:
        (now, *later), total = carry
        return [*later, loaded(token + AHEAD)], total + one(token, *now)

    total = plgpu.layout_cast(jnp.zeros((HEADS, DIM), jnp.float32), TILE)
    ahead = [loaded(begin + i) for i in range(AHEAD)]
    _, total = lax.fori_loop(begin, end, step, (ahead, total))
    of_weight.at[block, group][...] = total
