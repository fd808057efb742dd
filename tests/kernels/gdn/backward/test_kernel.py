"""Backward kernels of the chunked delta rules against float64, interpreted and on a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gdn, kda
from jaxattn.kernels.gdn.backward import state_pass
from jaxattn.kernels.gdn.backward.launch import (
    ChunkedTokens,
    DeltaRuleBackwardCall,
    gdn_backward_mosaic,
)
from jaxattn.kernels.gdn.prefill.intra_chunk.launch import whole_chunk_matrices
from jaxattn.ops.gdn import chunk
from jaxattn.ops.gdn.chunk_gradient import matrices_of_both_passes
from tests.helpers.gdn_gradients import NAMES, assert_gradients, oracle_gradients, recurrence
from tests.helpers.gdn_prefill_cases import make_case
from tests.helpers.kernel_cases import both_devices, no_races, relative, slow

BOUND = 1e-2  # relative L2 of each gradient in bfloat16


def make_cotangents(case, *, of_state=1.0):
    """Of the output, NaN for padding, and of the final states, whose numbers are so large."""
    rng = np.random.default_rng(1)
    dout = rng.normal(size=case.v.shape)
    dout[:, case.tokens :] = np.nan
    dfinal = of_state * rng.normal(size=case.initial_state.shape)
    return jnp.asarray(dout.astype(case.v.dtype)), jnp.asarray(dfinal.astype(np.float32))


def gradients(case, cotangents, implementation, *, l2norm=True, **options):
    """Of a case's arguments and its initial states."""
    rule = kda.chunk_kda if case.g.ndim == 4 else gdn.chunk_gated_delta_rule

    def op(*arguments):
        *tokens, state = arguments
        return rule(
            *tokens, initial_state=state, cu_seqlens=case.cu_seqlens, output_final_state=True,
            use_qk_l2norm=l2norm, implementation=implementation, **options,
        )  # fmt: skip

    @jax.jit
    def run(arguments, cotangents):
        return jax.vjp(op, *arguments)[1](cotangents)

    return run((*case.args, case.initial_state), cotangents)


def assert_right(case, implementation, *, of_state=1.0, bound=BOUND, **options):
    cotangents = make_cotangents(case, of_state=of_state)
    actual = gradients(case, cotangents, implementation, **options)
    expected = oracle_gradients(case, *cotangents, **options)
    for ours, argument in zip(actual, (*case.args, case.initial_state), strict=True):
        assert ours.shape == argument.shape and ours.dtype == argument.dtype
    assert_gradients(case, actual, expected, bound=bound)
    return actual, expected


@pytest.mark.parametrize("channels", [False, True])
def test_the_gradients_of_float64_are_finite_differences(channels):
    case = make_case([6], value_heads=2, padding=0, channels=channels, gates=0.1)
    dout, dfinal = make_cotangents(case)
    expected = oracle_gradients(case, dout, dfinal)
    arguments = [np.asarray(x, np.float64)[0] for x in case.args]
    arguments.append(np.asarray(case.initial_state, np.float64)[0])
    rng = np.random.default_rng(2)
    with jax.enable_x64(True):
        run = jax.jit(partial(recurrence, scale=128**-0.5, l2norm=True))
        weights = [np.asarray(x, np.float64)[0] for x in (dout, dfinal)]

        def loss(place, given):
            results = run(*arguments[:place], given, *arguments[place + 1 :])
            return sum(
                (np.asarray(x) * weight).sum() for x, weight in zip(results, weights, strict=True)
            )

        for place, (name, gradient) in enumerate(zip(NAMES, expected, strict=True)):
            along = rng.normal(size=arguments[place].shape)
            ahead, behind = (loss(place, arguments[place] + step * along) for step in (1e-5, -1e-5))
            np.testing.assert_allclose(
                (gradient[0] * along).sum(), (ahead - behind) / 2e-5, rtol=1e-5, err_msg=name
            )


@pytest.mark.slow_cases(
    reason="an end in another place of a chunk, more heads of a key; found by one end there too"
)
@both_devices
@pytest.mark.parametrize(
    "lens, key_heads, value_heads",
    [([66, 0], 1, 2), slow([1, 0, 130, 64], 2, 8), slow([66, 0], 2, 2)],
)
def test_packed_sequences_before_nan(lens, key_heads, value_heads, implementation):
    case = make_case(lens, key_heads=key_heads, value_heads=value_heads, gates=0.1)
    actual, _ = assert_right(case, implementation)
    empty = lens.index(0)
    np.testing.assert_array_equal(actual[-1][empty], make_cotangents(case)[1][empty])


@both_devices
@pytest.mark.slow(reason="an overflow or 0 * inf; found by gradients of such gates in XLA too")
@pytest.mark.parametrize("channels", [False, True])
def test_gates_from_nothing_to_minus_infinity(channels, implementation):
    case = make_case([130], value_heads=4, padding=3, channels=channels)
    g, beta = np.array(case.g), np.array(case.beta)
    g[:, :, 0], g[:, :, 1] = 0.0, -1000.0
    g[:, ::5, 2:] -= 1000.0
    g[0, 9, 3] = -np.inf
    beta[:, :32, 0], beta[:, 40:50, 2] = 1e-6, 0.0
    case.g, case.beta = jnp.asarray(g), jnp.asarray(beta)
    actual, expected = assert_right(case, implementation)
    # Gradients differ in size: each head has to be right. Those of gates and strengths are sums
    # whose terms cancel: rounding the final states' gradients to bfloat16 alone puts one off by
    # 5.8e-3 in float64.
    bounds = BOUND, 2 * BOUND, (1 + channels) * BOUND
    for ours, theirs, bound in zip(actual[2:5], expected[2:5], bounds, strict=True):
        for head in (0, 2, 3):
            assert relative(ours[:, :130, head], theirs[:, :, head]) < bound
    assert not np.any(actual[3][:, :130, 1])


@both_devices
@pytest.mark.slow(reason="a factor of a length; found with l2norm, and by scales forward")
def test_rows_without_l2norm_in_float16_and_a_negative_scale(implementation):
    """The state's gradient passes float16's largest number, and no gradient of a token does.

    That of g is a sum whose terms cancel. Tokens are rounded to bfloat16, which alone puts it off
    by 7.0e-3 in float64; with both cotangents rounded too it is 1.04e-2, and 1.29e-2 by the
    kernels, which round states and their gradients. Products in float16, as XLA has them, give NaN.
    """
    case = make_case([100], padding=0, dtype=jnp.float16)
    norm = lambda x: x / jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True)  # noqa: E731
    case.q, case.k = (norm(x).astype(jnp.float16) for x in (case.q, case.k))
    case.g, case.beta = case.g.at[:, -1].set(-12.0), case.beta.at[:, -1].set(1e-7)
    assert_right(case, implementation, l2norm=False, scale=-0.5, of_state=1e6, bound=2 * BOUND)


@both_devices
@pytest.mark.slow(reason="a state's decay by channel; found by the prefill of such decays too")
def test_decays_per_channel(implementation):
    case = make_case([70, 0, 20], channels=True, gates=0.1)
    assert_right(case, implementation)


@both_devices
@pytest.mark.slow(reason="inverses of the forward pass; found by gradients of full rows too")
def test_of_full_chunks_what_the_forward_pass_kept_gives_the_same_bits(implementation, monkeypatch):
    case = make_case([64, 128], padding=0, value_heads=2, gates=0.1)
    kept = []

    def noted(*arguments, **options):
        kept.append(matrices_of_both_passes(*arguments, **options))
        return kept[-1]

    monkeypatch.setattr(chunk, "matrices_of_both_passes", noted)
    first, _ = assert_right(case, implementation)
    assert len(kept) == 1 and kept[0] is not None
    monkeypatch.setattr(chunk, "matrices_of_both_passes", lambda *arguments, **options: None)
    second = gradients(case, make_cotangents(case), implementation)
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


@pytest.mark.slow(reason="a race between warpgroups; found by wrong gradients above too")
@pytest.mark.parametrize("sms", [1, 132])
def test_no_race_in_the_interpreter(sms, monkeypatch):
    """With both halves of a state in a block and what the forward pass kept, and with one."""
    monkeypatch.setattr(state_pass, "NUM_SMS", sms)
    case = make_case([192], padding=0)
    dout, dfinal = make_cotangents(case)
    tokens = ChunkedTokens(*(x[0] for x in case.args))
    runs = np.array([[0], [3]], np.int32)
    call = DeltaRuleBackwardCall(
        tokens, dout[0], runs, case.initial_state, dfinal, scale=0.1, use_qk_l2norm=True
    )
    with no_races():
        if sms == 1:
            matrices = whole_chunk_matrices(
                tokens.q, tokens.k, tokens.g, tokens.beta,
                scale=0.1, use_qk_l2norm=True, backward=True, interpret=True,
            )  # fmt: skip
            call = call._replace(matrices=matrices)
        found, dstart = jax.block_until_ready(gdn_backward_mosaic(call, interpret=True))
    expected = oracle_gradients(case, dout, dfinal, scale=0.1)
    assert_gradients(case, (*(x[None] for x in found), dstart), expected, bound=BOUND)


@pytest.mark.gpu
@pytest.mark.parametrize("value_heads", [8, 16])
@pytest.mark.parametrize("rule", ["gdn", "kda"])
def test_the_same_bits_twice_at_full_width(rule, value_heads):
    """With one half of a state in a block of the state pass, and with both."""
    case = make_case(
        [1000, 24, 1024], key_heads=4 if rule == "gdn" else value_heads, value_heads=value_heads,
        channels=rule == "kda", gates=0.1,
    )  # fmt: skip
    first, _ = assert_right(case, "mosaic_gpu")
    second = gradients(case, make_cotangents(case), "mosaic_gpu")
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))
