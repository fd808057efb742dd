"""What ops take in place of an int32 array, a Python int and a Python float, and x64 mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gdn, mla
from tests.helpers.every_op import OPS, arguments

INTEGERS = ("block_tables", "seq_lens", "query_lens", "lengths", "state_indices", "positions")
NUMBERS = ("scale", "eps", "layer", "kv_lora_rank", "qk_head_dim", "rope_dim")
ARRAYS = {"int64": np.int64, "uint32": np.uint32, "int8": np.int8}


@functools.cache
def expected(name):
    return OPS[name](**arguments(name))


def check(name, **changed):
    found = OPS[name](**(arguments(name) | changed))

    def same(found, wanted):
        if not isinstance(wanted, jax.Array):
            assert found == wanted
            return
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)

    jax.tree.map(same, found, expected(name))


def cases(names):
    return [(name, given) for name in OPS for given in arguments(name) if given in names]


@pytest.mark.sampled
@pytest.mark.parametrize("name, given", cases(INTEGERS))
def test_integers_of_any_kind(name, given):
    numbers = arguments(name)[given]
    for kind in (*ARRAYS.values(), jnp.int32):
        check(name, **{given: kind(numbers)})
    if given != "positions":
        check(name, **{given: numbers.tolist()})
        check(name, **{given: tuple(numbers.tolist())})
    with pytest.raises(TypeError, match=rf"{given}|positions"):
        OPS[name](**(arguments(name) | {given: numbers.astype(np.float32)}))


@pytest.mark.sampled
@pytest.mark.parametrize("name, given", cases(NUMBERS))
def test_numbers_of_any_kind(name, given):
    number = arguments(name)[given]
    if isinstance(number, int):
        kinds = [np.int64, np.int32, np.uint8]
        kinds += [np.array, jnp.int32] if given == "layer" else []
    else:
        kinds = [np.float64, np.array, jnp.float32]
    for kind in kinds:
        check(name, **{given: kind(number)})
    if name != "softmax_scale":
        for wrong in ("1", [1], True, 1.5j):
            with pytest.raises((TypeError, ValueError), match=f"{name}: .*{given}"):
                OPS[name](**(arguments(name) | {given: wrong}))


@pytest.mark.sampled
@pytest.mark.parametrize("name", OPS)
def test_64_bits(name):
    """Of float32 arguments every result is what it is without; integers may be int64, traced."""
    given = arguments(name)
    integers = {key: x for key, x in given.items() if key in INTEGERS}

    def step(integers, rest):
        return OPS[name](**(given | rest | integers))

    fixed = ("sizes", "rotation", "kv_lora_rank", "scale", "eps")
    rest = {
        key: x
        for key, x in given.items()
        if isinstance(x, np.ndarray) and key not in (*INTEGERS, *fixed)
    }

    def types(tree):
        return [(x.shape, x.dtype) for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]

    if name == "rotation" or name.endswith("scratch") or name == "softmax_scale":
        wanted, integers = types(expected(name)), {}
    else:
        wanted = types(jax.eval_shape(step, integers, rest))
    with jax.enable_x64(True):
        wide = {key: jax.ShapeDtypeStruct(x.shape, np.int64) for key, x in integers.items()}
        if name.endswith("scratch") or name == "softmax_scale":
            found = types(OPS[name](**given))
        else:
            found = types(jax.eval_shape(step, wide, rest))
    assert found == wanted


def test_traced_integers_that_no_int32_is():
    """They are lengths and pages that there are not, and not what is left of their low bits."""
    given = arguments("mla_decode")

    @jax.jit
    def step(block_tables, seq_lens):
        changed = dict(block_tables=block_tables, seq_lens=seq_lens)
        return mla.mla_decode(**(given | changed))

    tables, lens = (given[name].astype(np.int64) for name in ("block_tables", "seq_lens"))
    with jax.enable_x64(True):
        out, lse = step(tables, np.array([5, 2**32 + 5]))
        assert np.isfinite(lse[0]).all() and np.isneginf(lse[1]).all()
        out, _ = step(tables + np.array([[0], [2**32]]), lens)
    assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()


@pytest.mark.parametrize(
    "op, changed, error, words",
    [
        ("read", dict(pool=[1.0]), TypeError, "pool must be an array, got list"),
        ("read", dict(state_indices=None), TypeError, r"integers of shape \[B\], got None"),
        (
            "read",
            dict(state_indices=[0.5]),
            TypeError,
            r"integers of shape \[B\], got float64\[1\]",
        ),
        ("read", dict(state_indices=3), ValueError, r"integers of shape \[B\], got int64\[\]"),
        ("read", dict(layer=2), ValueError, r"layer=2 is out of range: pool \(2, 4, 5\) has 2"),
        ("read", dict(pool=np.ones(3)), ValueError, r"with layer \[L, Z, ...\], got \[3\]"),
        ("write", dict(values=[1.0]), TypeError, "values must be an array, got list"),
        ("write", dict(values=np.ones((2, 1))), ValueError, r"= \[2, 5\], .* got \[2, 1\]"),
    ],
)
def test_pools_name_the_argument_that_does_not_fit(op, changed, error, words):
    name = f"state_{op}"
    with pytest.raises(error, match=f"{name}: .*{words}"):
        getattr(gdn, name)(**(arguments(name) | changed))
