"""JAX's transformations of every public op, in XLA and in kernels: the table of docs/transforms.md.

Here kernels run in the interpreter, or are lowered for a GPU. Forward mode is in
test_forward_mode.py, and x64 of XLA's ops in test_given.py.
"""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jaxattn.core.dispatch import kernels_untraced
from jaxattn.kernels.gqa.decode.fp8_register_operands import half_queries
from tests.helpers import every_kernel, every_op
from tests.helpers.every_kernel import on_hopper

PAGE = Path(__file__).parents[2] / "docs" / "transforms.md"
BY_XLA, BY_KERNEL, REFUSED = "by XLA", "by a kernel", "refused"
# What takes longer than the rest together; `--slow` runs it.
SLOWLY_INTERPRETED = (
    *("mla_decode", "causal_attention", "gqa_decode", "gqa_prefill", "gqa_attention"),
    *("turbo_attention", "gated_delta_rule_decode", "chunk_gated_delta_rule"),
    *("gated_delta_rule_prefill", "mixture_of_experts"),
    *("gated_delta_net_decode", "gqa_append", "turbo_append", "kimi_delta_attention_decode"),
    *("chunk_kda", "kda_prefill"),
)
SLOWLY_LOWERED = (
    *("mla_prefill", "causal_attention", "gqa_prefill", "gqa_attention", "turbo_attention"),
    *("gated_delta_net_decode", "gated_delta_rule_decode", "chunk_gated_delta_rule"),
    *("gated_delta_rule_prefill", "mixture_of_experts", "mla_decode", "chunk_kda", "kda_prefill"),
)


def rows() -> dict[str, list[str]]:
    """The cells behind each op of the docs' table."""
    table = PAGE.read_text().partition("\n| op |")[2].partition("\n\n")[0]
    lines = re.findall(r"^\| `(\w+)` \|(.+)\|$", table, re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in lines}


ROWS = rows()


def parts(name):
    """(arrays, the rest, the op of arrays that returns arrays) of XLA's op."""
    given = every_op.arguments(name)

    def is_array(x):
        leaves = jax.tree.leaves(x)
        return bool(leaves) and all(isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves)

    arrays = {key: x for key, x in given.items() if is_array(x)}
    rest = {key: x for key, x in given.items() if key not in arrays}

    def op(arrays):
        outs = jax.tree.leaves(every_op.OPS[name](**arrays, **rest))
        return [x for x in outs if hasattr(x, "dtype")]

    return arrays, op


def some_slow(names, slow):
    reason = "a batching rule that is missing; found by the small kernels and by gradients too"
    mark = pytest.mark.slow(reason=reason)
    return [pytest.param(name, marks=mark) if name in slow else name for name in names]


OF_ARRAYS = [name for name in every_op.OPS if parts(name)[0]]
MODULES = [name for name in OF_ARRAYS if name[0].isupper()]  # made of the ops


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def kernel(name, implementation, seed=0):
    """(arrays, the op of arrays)."""
    arrays, rest = every_kernel.arguments(name, seed)
    return arrays, lambda arrays: every_kernel.OPS[name](
        **arrays, **rest, implementation=implementation
    )


def floats(tree):
    return [
        path
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]


def replaced(tree, path, value):
    return jax.tree_util.tree_map_with_path(lambda at, x: value if at == path else x, tree)


def loss_of(op, arrays, path, wrap=lambda f: f):
    """(a sum of what the op returns, of one of its arrays, that array)"""
    leaf = dict(jax.tree_util.tree_flatten_with_path(arrays)[0])[path]

    def loss(x):
        outs = jax.tree.leaves(wrap(lambda x: op(replaced(arrays, path, x)))(x))
        return sum(
            jnp.sum(out.astype(jnp.float32))
            for out in outs
            if jnp.issubdtype(out.dtype, jnp.floating)
        )

    return loss, leaf


@pytest.mark.sampled
@pytest.mark.parametrize("name", some_slow(OF_ARRAYS, MODULES))
def test_vmap_of_xla_is_each_alone(name):
    arrays, op = parts(name)
    alone = jax.jit(op)(arrays)
    both = jax.jit(jax.vmap(op))(jax.tree.map(lambda x: np.stack([x, x]), arrays))
    for one, two in zip(alone, both, strict=True):
        for each in two:
            np.testing.assert_allclose(each, one, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("name", OF_ARRAYS)
def test_an_exported_op_of_xla_has_its_results(name):
    arrays, op = parts(name)
    exported = export.export(jax.jit(op), platforms=["cpu", "cuda"])(shapes(arrays))
    wanted = [(x.shape, x.dtype) for x in jax.eval_shape(op, arrays)]
    assert [(x.shape, x.dtype) for x in exported.out_avals] == wanted
    assert exported.platforms == ("cpu", "cuda")


@pytest.mark.sampled
@pytest.mark.parametrize("name", OF_ARRAYS)
def test_remat_of_xla_has_a_gradient(name):
    arrays, op = parts(name)
    for path in floats(arrays)[:1]:
        loss, leaf = loss_of(op, arrays, path, jax.checkpoint)
        assert jax.eval_shape(jax.grad(loss), leaf).shape == leaf.shape


def test_the_table_has_every_op_with_a_kernel():
    assert set(ROWS) == set(every_kernel.OPS)


@pytest.mark.sampled
@pytest.mark.parametrize("name", every_kernel.OPS)
def test_a_kernel_has_the_gradient_of_the_table_or_refuses_by_name(name):
    arrays, op = kernel(name, "mosaic_gpu")
    refused = ROWS[name][0] == REFUSED
    for path in floats(arrays) if refused else floats(arrays)[:1]:
        loss, leaf = loss_of(op, arrays, path, jax.checkpoint)
        with on_hopper(), kernels_untraced(True):  # shapes are all that is asked for
            if refused:
                with pytest.raises(NotImplementedError, match=f"^{name}: .*no gradient"):
                    jax.eval_shape(jax.grad(loss), leaf)
            else:
                assert ROWS[name][0] in (BY_XLA, BY_KERNEL)
                assert jax.eval_shape(jax.grad(loss), leaf).shape == leaf.shape


@pytest.mark.parametrize("name", ["gqa_prefill", "mla_prefill"])
def test_a_prompts_gradient_by_xla_says_what_to_train_with(name):
    arrays, op = kernel(name, "mosaic_gpu")
    loss, leaf = loss_of(op, arrays, floats(arrays)[0], jax.checkpoint)
    said = f"^XLA computes the gradient: {name}: .* train with .*attention$"
    with on_hopper(), kernels_untraced(True), pytest.warns(UserWarning, match=said):
        jax.eval_shape(jax.grad(loss), leaf)


def test_a_refused_gradient_is_no_fallback():
    """Whether or not `jit` stands between, and where another op's gradient is all that is asked."""
    arrays, rest = every_kernel.arguments("rms_norm_layer")

    def loss(x, y):
        return every_kernel.OPS["rms_norm_layer"](x, arrays["weights"], **rest).sum() + (y * y)

    with on_hopper():
        for of in (loss, jax.jit(loss)):
            with pytest.raises(NotImplementedError, match="^rms_norm_layer: .*no gradient"):
                jax.grad(of)(arrays["x"], 1.0)
            jax.eval_shape(jax.grad(of, argnums=1), arrays["x"], 1.0)


@pytest.mark.sampled
@pytest.mark.parametrize("name", some_slow(every_kernel.OPS, SLOWLY_LOWERED))
def test_a_kernel_is_exported_for_a_gpu_under_vmap(name):
    arrays, op = kernel(name, "mosaic_gpu")
    both = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), arrays)
    with on_hopper():
        exported = export.export(jax.jit(jax.vmap(op)), platforms=["cuda"])(both)
        alone = jax.tree.leaves(jax.eval_shape(op, arrays))
    wanted = [((2, *x.shape), x.dtype) for x in alone]
    assert [(x.shape, x.dtype) for x in exported.out_avals] == wanted
    assert "mosaic_gpu" in exported.mlir_module()


# Kernels whose own tests leave x64 to --slow.
ALWAYS_WIDE = ("mla_decode", "mla_prefill", "gated_delta_rule_decode")


@pytest.mark.parametrize(
    "name",
    [
        name if name in ALWAYS_WIDE else pytest.param(name, marks=pytest.mark.sampled)
        for name in every_kernel.OPS
    ],
)
def test_a_kernel_has_the_same_results_with_64_bits(name):
    arrays, op = kernel(name, "mosaic_gpu")
    wide = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, np.int64 if jnp.issubdtype(x.dtype, jnp.signedinteger) else x.dtype
        ),
        arrays,
    )
    with on_hopper():
        wanted = [(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(op, shapes(arrays)))]
        with jax.enable_x64(True):
            found = jax.tree.leaves(jax.eval_shape(op, wide))
    assert [(x.shape, x.dtype) for x in found] == wanted


def test_fp8_queries_are_the_same_with_64_bits():
    q = jnp.asarray(np.random.default_rng(0).normal(size=(3, 64)), jnp.float32)
    halves = functools.partial(half_queries, wide=lambda x: x[:, None])
    wanted = halves(q)
    with jax.enable_x64(True):
        for x, y in zip(halves(q), wanted, strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)


@pytest.mark.sampled
@pytest.mark.parametrize("name", some_slow(every_kernel.OPS, SLOWLY_INTERPRETED))
def test_vmap_of_a_kernel_is_each_alone(name):
    (one, op), (other, _) = (kernel(name, "mosaic_gpu_interpret", seed) for seed in (0, 1))
    if ROWS[name][1] == "lowered":  # a launch stands in a cond, and the interpreter has effects
        with pytest.raises(NotImplementedError, match="IO effect not supported in vmap-of-cond"):
            jax.vmap(op)(jax.tree.map(lambda *x: jnp.stack(x), one, other))
        return
    assert ROWS[name][1] == "equal"
    both = jax.vmap(jax.jit(op))(jax.tree.map(lambda *x: jnp.stack(x), one, other))
    for i, given in enumerate((one, other)):
        alone = jax.tree.leaves(jax.jit(op)(given))
        for each, x in zip(jax.tree.leaves(both), alone, strict=True):
            np.testing.assert_array_equal(each[i], x)
