"""Older keywords of ops work, with a warning, for one more minor version."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gdn
from jaxattn.ops.gdn.prefill import gated_delta_rule_prefill
from tests.helpers.gdn_cases import make, make_state

TOKENS, SLOTS = 32, 4
INPUTS = (*make(1, TOKENS, 1, 2, 16, 8), make_state(SLOTS, 2, 16, 8), np.array([1]))
GATE, WEIGHT = np.ones((1, TOKENS, 16), np.float32), np.full(8, 0.5, np.float32)
KEPT = np.array([[3, -1]])


def prefill(**given):
    """Compiled as one, with its arguments known."""
    call = lambda: gated_delta_rule_prefill(  # noqa: E731
        *INPUTS, chunk_size=16, implementation="xla", **given
    )
    return jax.jit(call)()


def test_older_keywords_give_what_their_groups_give_and_warn_at_the_callers_line():
    with pytest.warns(DeprecationWarning) as caught:
        old = prefill(
            checkpoint_indices=KEPT,
            checkpoint_tokens=16,
            gate=GATE,
            norm_weight=WEIGHT,
            norm_eps=1e-3,
        )
    assert {str(each.message) for each in caught} == {
        "gated_delta_rule_prefill: instead of checkpoint_indices, checkpoint_tokens, give "
        "checkpoints=Checkpoints(...)",
        "gated_delta_rule_prefill: instead of gate, norm_weight, norm_eps, give "
        "output_norm=OutputNorm(...)",
    }
    assert {each.filename for each in caught} == {__file__}
    new = prefill(
        checkpoints=gdn.Checkpoints(slots=KEPT, tokens=16),
        output_norm=gdn.OutputNorm(gate=GATE, weight=WEIGHT, eps=1e-3),
    )
    for x, y in zip(old, new, strict=True):
        np.testing.assert_array_equal(x, y)
    assert not np.array_equal(new[1][3], INPUTS[5][3])  # the checkpoint was kept


def test_older_keywords_of_none_are_as_if_not_given():
    plain, none = prefill(), prefill(checkpoint_indices=None, gate=None, norm_weight=None)
    for x, y in zip(plain, none, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_group_beside_its_older_keywords_is_refused():
    kept = gdn.Checkpoints(slots=jnp.array([[3]]), tokens=16)
    with pytest.raises(
        TypeError, match=r"checkpoint_tokens cannot be combined with checkpoints=; give only"
    ):
        prefill(checkpoints=kept, checkpoint_tokens=16)


def test_half_of_a_group_is_refused():
    with pytest.warns(DeprecationWarning), pytest.raises(TypeError, match="argument: 'tokens'"):
        prefill(checkpoint_indices=KEPT)
