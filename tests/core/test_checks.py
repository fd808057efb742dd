"""What the delta rule's ops and the convolution refuse, each named with what it was."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gated_delta_net_decode, gdn, pack_gdn_weights
from jaxattn.ops.gdn.prefill import gated_delta_rule_prefill
from tests.helpers.at_once import at_once


def ones(shape, dtype=np.float32):
    """Without compiling: JAX's own takes longer than most of these tests."""
    return jnp.asarray(np.ones(shape, dtype))


def zeros(shape, dtype=np.float32):
    return jnp.asarray(np.zeros(shape, dtype))


TOKENS = dict(zip("qkv", [ones((1, 20, 1, 4))] * 3, strict=True))
SEQUENCE = TOKENS | dict(g=zeros((1, 20, 1)), beta=ones((1, 20, 1)))
POOL = dict(state=zeros((2, 3, 1, 4, 4)), state_indices=jnp.array([0]), layer=0)
GATES = dict(a=zeros((1, 20, 1)), b=zeros((1, 20, 1)), A_log=ones(1), dt_bias=ones(1))
LAYER = dict(
    qkvz=ones((1, 1, 16)),
    ba=ones((1, 1, 2)),
    weights=at_once(pack_gdn_weights, ones(1), ones(1), ones(4), ones((12, 4))),
    conv_state=zeros((2, 3, 3, 12)),
    **POOL,
)
CONV = dict(x=ones((1, 20, 2)), weight=ones((2, 4)))
OPS = {
    "chunk": (gdn.chunk_gated_delta_rule, SEQUENCE),
    "recurrent": (gdn.recurrent_gated_delta_rule, SEQUENCE),
    "prefill": (gated_delta_rule_prefill, SEQUENCE | POOL),
    "decode": (gdn.gated_delta_rule_decode, TOKENS | GATES | POOL),
    "layer": (gated_delta_net_decode, LAYER),
    "conv": (gdn.causal_conv1d, CONV),
    "update": (
        gdn.causal_conv1d_update,
        CONV | dict(conv_state=ones((2, 3, 3, 2)), state_indices=jnp.array([0]), layer=0),
    ),
    "gates": (gdn.gdn_gates, GATES),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", OPS)
def test_the_arguments_that_the_others_change(name):
    op, arguments = OPS[name]
    jax.eval_shape(op, **arguments) if "layer" not in arguments else at_once(op, **arguments)


@pytest.mark.parametrize(
    "names, change, error, message",
    [
        ("chunk recurrent prefill decode", {"q": None}, TypeError, "q must be an array, got None"),
        ("chunk recurrent prefill", {"beta": [[1]]}, TypeError, "beta must be an array, got list"),
        ("decode gates", {"A_log": [1.0]}, TypeError, "A_log must be an array, got list"),
        (
            "chunk prefill",
            {"beta": ones((1, 20, 1), bool)},
            TypeError,
            "beta must hold floats",
        ),
        (
            "decode gates",
            {"b": ones((1, 20, 1), int)},
            TypeError,
            "b must hold floats, got int",
        ),
        (
            "conv update",
            {"x": ones((1, 20, 2), int)},
            TypeError,
            "x must hold floats, got int",
        ),
        ("conv", {"x": ones((1, 20, 2), complex)}, TypeError, "x must hold floats"),
        ("conv update", {"bias": [0.0, 0.0]}, TypeError, "bias must be an array, got list"),
        ("conv", {"initial_state": [[[0.0]]]}, TypeError, "initial_state must be an array"),
        ("chunk recurrent", {"initial_state": [0.0]}, TypeError, "initial_state must be an array"),
        ("update layer", {"conv_state": None}, TypeError, "conv_state must be an array"),
        ("prefill decode layer", {"state": None}, TypeError, "state must be an array, got None"),
        (
            "prefill decode layer update",
            {"state_indices": None},
            TypeError,
            r"state_indices must be integers of shape \[1\], got None",
        ),
        (
            "chunk recurrent prefill decode layer",
            {"scale": jnp.nan},
            ValueError,
            "scale must be fin",
        ),
        (
            "chunk recurrent prefill decode layer",
            {"scale": "x"},
            TypeError,
            "scale must be a Python number, got str",
        ),
        (
            "chunk prefill decode",
            {"scale": ones(1)},
            TypeError,
            "scale must be a Python number",
        ),
        ("layer", {"eps": None}, TypeError, "eps must be a Python number, got NoneType"),
        ("decode layer", {"arena": 4}, TypeError, "arena must be an Arena from .* got int"),
        *(
            ("prefill decode layer update", {"layer": layer}, error, message)
            for layer, error, message in [
                (2, ValueError, r"layer=2 is out of range: (conv_)?state \(2, 3.* has 2"),
                (np.int64(5), ValueError, "layer=5 is out of range"),
                (np.array(-1), ValueError, "layer=-1 is out of range"),
                (jnp.int32(-1), ValueError, "layer=-1 is out of range"),
                (True, TypeError, "layer must be an integer, got bool"),
                (1.0, TypeError, "layer must be an integer, got float"),
                (jnp.float32(1), TypeError, "layer must be an integer scalar, got float32"),
                (
                    zeros(1, int),
                    TypeError,
                    r"an integer scalar, got int32 \(1,\)",
                ),
            ]
        ),
        (
            "gates",
            {"a": zeros((2, 5, 1)), "b": zeros((2, 5, 2))},
            ValueError,
            r"a and b must have the same shape .*, got \(2, 5, 1\) and \(2, 5, 2\)",
        ),
        ("gates", {"dt_bias": ones(3)}, ValueError, r"dt_bias must be \[Hv=1\], .*got \(3,\)"),
    ],
)
def test_it_is_refused_by_name(names, change, error, message):
    for name in names.split():
        op, arguments = OPS[name]
        with pytest.raises(error, match=message):
            op(**arguments | change)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["chunk", "recurrent", "prefill", "decode", "layer"])
def test_a_scale_that_is_known_may_be_an_array(name):
    op, arguments = OPS[name]
    expected = op(**arguments, scale=0.5)[0]
    for scale in (np.float32(0.5), np.array(0.5), jnp.float32(0.5)):
        np.testing.assert_array_equal(op(**arguments, scale=scale)[0], expected)


def test_the_recurrence_has_a_gradient_of_its_scale():
    def total(scale):
        return gdn.recurrent_gated_delta_rule(**SEQUENCE, scale=scale)[0].sum()

    np.testing.assert_allclose(jax.grad(total)(0.5), 2 * total(0.5), rtol=1e-6)


@pytest.mark.parametrize("number", [1, np.int64(1), np.array(1), jnp.int32(1)])
def test_any_integer_is_a_layer(number):
    op, arguments = OPS["decode"]
    expected = jax.jit(functools.partial(op, **arguments | {"layer": 1}))()
    for x, y in zip(op(**arguments | {"layer": number}), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"dt_bias": ones(2)},
            r"A_log and dt_bias must have the same shape.* got \(1,\) and \(2,\)",
        ),
        ({"norm": ones((3, 4))}, r"norm must be \['Dv'\], got \(3, 4\)"),
        ({"conv": ones((4, 12))}, r"conv must be \['Dc', 'W'\] .* Hv Dv=4, got \(4, 12\)"),
        ({"conv": ones((12, 1, 4))}, r"conv must be .* got \(12, 1, 4\)"),
        ({"conv": ones((3, 12, 4))}, r"conv must be .* got \(3, 12, 4\)"),
        ({"conv": ones((4, 4))}, "conv must be"),
    ],
)
def test_weights_that_do_not_fit_each_other_are_not_packed(change, message):
    weights = dict(A_log=ones(1), dt_bias=ones(1), norm=ones(4), conv=ones((12, 4)))
    with pytest.raises(ValueError, match=message):
        pack_gdn_weights(**weights | change)
    with pytest.raises(TypeError, match="conv must hold floats"):
        pack_gdn_weights(**weights | {"conv": ones((12, 4), int)})
    stacked = {name: jnp.stack([x, x]) for name, x in weights.items()}
    assert pack_gdn_weights(**stacked).shape == (2, 2 + 4 + 4 * 12)


def test_offsets_of_a_narrow_type_reach_past_what_it_holds():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    q, k, v = draw(3, 1, 200, 1, 4)
    g, beta = -jnp.abs(draw(1, 200, 1)), jnp.full((1, 200, 1), 0.5)
    x, weight = draw(1, 200, 3), draw(3, 4)
    pool = zeros((2, 1, 4, 4)), jnp.array([0, 1])
    for op, arguments in (
        (gdn.recurrent_gated_delta_rule, (q, k, v, g, beta)),
        (gdn.chunk_gated_delta_rule, (q, k, v, g, beta)),
        (gdn.causal_conv1d, (x, weight)),
        (gated_delta_rule_prefill, (q, k, v, g, beta, *pool)),
    ):
        wide, narrow = (
            at_once(op, *arguments, cu_seqlens=np.array([0, 60, 100], dtype))[0]
            for dtype in (np.int32, np.int8)
        )
        np.testing.assert_array_equal(narrow, wide)


def test_no_checkpoints_of_a_short_prompt():
    nowhere = gdn.Checkpoints(slots=zeros((1, 0), jnp.int32), tokens=64)
    plain = gated_delta_rule_prefill(**OPS["prefill"][1])
    none = gated_delta_rule_prefill(**OPS["prefill"][1], checkpoints=nowhere)
    for x, y in zip(plain, none, strict=True):
        np.testing.assert_array_equal(x, y)
