"""Batches without a row, rows without a token and layers without a head: each op takes them or
says by name that it does not.
"""

import jax
import numpy as np
import pytest

from tests.helpers.every_op import OPS, arguments

MLA_MODULE = [name for name in OPS if name.startswith("MultiHeadLatentAttention")]
GQA = [name for name in OPS if name.startswith(("gqa", "GroupedQueryAttention"))]
# The mixers of MLA and GQA need a row, a token and a head.
NOT_EMPTY = [
    *("mla_decode", "mla_prefill", "mla_cache_write", "mla_append", "absorb_query"),
    *("absorb_output", "causal_attention", "mla.decode_schedule", "mla.scratch", *MLA_MODULE),
    *GQA,
]
REFUSED = {
    "batch": NOT_EMPTY,
    "tokens": [
        *(*NOT_EMPTY, "gated_delta_net_decode", "GatedDeltaNet.decode"),
        *("kimi_delta_attention_decode", "KimiDeltaAttention.decode"),
    ],
    "heads": [
        name
        for name in NOT_EMPTY
        if name not in ("mla_cache_write", "mla_append", "gqa_cache_write")
    ],
    "keys": [
        name
        for name in OPS
        if name in ("pack_gdn_weights", "gated_delta_net_decode")
        or name.startswith("GatedDeltaNet")
        or "delta_rule" in name
        or name in ("chunk_kda", "recurrent_kda", "kda_prefill", "kda_decode")
        or name in GQA
    ],
    "features": ["rms_norm_layer", "RMSNorm", "Linear", "GatedMLP"],
}
REFUSED["values"] = [
    *(name for name in REFUSED["keys"] if name not in GQA),
    *(name for name in OPS if name.startswith("KimiDeltaAttention")),
    *("gdn.scratch", "pack_kda_weights", "kimi_delta_attention_decode"),
]


POOLS = ("state", "kv_cache", "conv_state", "ssm_state", "pool")


@pytest.mark.sampled
@pytest.mark.parametrize("axis", REFUSED)
@pytest.mark.parametrize("name", OPS)
def test_an_empty_axis_works_or_is_refused_by_name(name, axis):
    empty = arguments(name, **{axis: 0})
    if name in REFUSED[axis]:
        with pytest.raises(ValueError, match=f"^{name.partition('.')[0]}.*: "):
            OPS[name](**empty)
        return
    outs = [x for x in jax.tree.leaves(OPS[name](**empty)) if isinstance(x, jax.Array)]
    assert not any(np.isnan(out).any() for out in outs)
    pools = [empty[pool] for pool in POOLS if pool in empty]
    if axis == "batch" and name != "state_read":  # without a row they keep what they hold
        for pool in pools:
            assert any(np.array_equal(out, pool) for out in outs)


@pytest.mark.parametrize("indices", ["state_indices", "write_indices"])
def test_decode_of_no_tokens_writes_after_none_of_them(indices):
    given = arguments("gated_delta_rule_decode", tokens=0)
    if indices == "write_indices":
        given |= dict(write_indices=np.zeros((2, 0), np.int32))
    o, state = OPS["gated_delta_rule_decode"](**given)
    assert o.shape == (2, 0, 2, 6)
    np.testing.assert_array_equal(state, given["state"])


@pytest.mark.parametrize(
    "name, sizes, words",
    [
        ("MultiHeadLatentAttention", dict(num_heads=0), "num_heads must be a positive integer"),
        ("MultiHeadLatentAttention", dict(num_heads=2.0), "num_heads must be a positive integer"),
        ("GatedDeltaNet", dict(num_k_heads=0, num_v_heads=2), "num_k_heads must be a positive int"),
        ("GatedDeltaNet", dict(num_k_heads=1, num_v_heads=-1), "num_v_heads must be a positive"),
        ("GatedMLP", dict(hidden=5, inner=0), "intermediate_size must be a positive integer"),
        ("Linear", dict(inputs=5, outputs=0), "out_features must be a positive integer, got 0"),
        ("RMSNorm", dict(features=True), "features must be a positive integer, got True"),
    ],
)
def test_a_module_names_the_size_that_no_layer_has(name, sizes, words):
    with pytest.raises(ValueError, match=f"^{name}: {words}"):
        OPS[name](x=None, sizes=sizes)
