"""Forward mode is refused by name in every transformation, and reverse mode is as it was."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxattn
from jaxattn.core.reverse_mode import in_reverse_mode_only

PACKAGE = Path(jaxattn.__file__).parent
# What ops call whose own operands pass through `in_reverse_mode_only`.
INSIDE_OF_OPS = {
    "core/numerics/matmul.py:matmul",
    "ops/gdn/chunk_gradient.py:differentiable",
    "ops/gdn/triangular_inverse.py:unit_lower_inverse",
}


@jax.custom_vjp
def scaled_sine(x, weight):
    return weight * jnp.sin(x)


scaled_sine.defvjp(
    lambda x, weight: (scaled_sine(x, weight), (x, weight)),
    lambda kept, of_y: (of_y * kept[1] * jnp.cos(kept[0]), of_y * jnp.sin(kept[0])),
)
op = in_reverse_mode_only("op", scaled_sine, instead="jnp.sin")
X = jnp.arange(3.0)
ONES = jnp.ones(3)


def repeated(x):
    return jax.lax.scan(lambda x, weight: (op(x, weight), None), x, jnp.ones((4, 3)))[0]


FORWARD = {
    "jvp": lambda: jax.jvp(op, (X, ONES), (X, ONES)),
    "jvp in jit": lambda: jax.jit(lambda x: jax.jvp(op, (x, ONES), (x, ONES)))(X),
    "jvp of jit": lambda: jax.jvp(jax.jit(op), (X, ONES), (X, ONES)),
    "jvp of scan": lambda: jax.jvp(repeated, (X,), (X,)),
    "jacfwd": lambda: jax.jacfwd(op)(X, ONES),
    "linearize": lambda: jax.linearize(op, X, ONES)[1](X, ONES),
    "hessian": lambda: jax.hessian(lambda x: op(x, ONES).sum())(X),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_names_the_op_the_argument_and_what_to_use(name):
    said = (
        r"^op has no forward-mode gradient of x \(jax.jvp, jax.jacfwd, jax.linearize\); use "
        "jax.grad or jax.vjp, or jnp.sin\\b"
    )
    with pytest.raises(TypeError, match=said):
        FORWARD[name]()


def test_forward_mode_under_vmap_and_jit_names_the_op():
    """There JAX refuses before the argument does."""
    with pytest.raises(TypeError, match="^op has no forward-mode gradient .*; use jax.grad"):
        jax.jit(jax.jacfwd(op))(X, ONES)


def test_a_field_of_an_operand_is_named_and_another_error_is_its_own():
    fields = in_reverse_mode_only("op", lambda operands, scale: operands["w"] * scale)
    with pytest.raises(TypeError, match=r"gradient of \['w'\] "):
        jax.jvp(lambda w: fields({"w": w}, 2), (X,), (X,))
    with pytest.raises(TypeError, match="unsupported operand"):
        in_reverse_mode_only("op", lambda x: x + None)(1)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint, jax.vmap])
def test_reverse_mode_has_the_gradients_that_it_had(around):
    def of(function):
        mapped = around(function)
        return jax.jit(jax.grad(lambda *args: mapped(*args).sum(), argnums=(0, 1)))(X, ONES)

    for found, wanted in zip(of(op), of(scaled_sine), strict=True):
        assert (found == wanted).all()


def test_reverse_mode_goes_through_scan_and_twice():
    grads = jax.grad(lambda x: repeated(x).sum())(X)
    assert jnp.allclose(grads, jax.grad(lambda x: jnp.sin(jnp.sin(jnp.sin(jnp.sin(x)))).sum())(X))
    twice = jax.jacrev(jax.grad(lambda x: op(x, ONES).sum()))(X)
    assert jnp.allclose(twice, -jnp.diag(jnp.sin(X)))


@jax.custom_vjp
def plain_sine(x):
    return jnp.sin(x)


plain_sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, of_y: (of_y * jnp.cos(x),))


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint, jax.vmap])
def test_forward_mode_of_a_gradient_works_where_both_passes_are_operations_of_jax(around):
    plain = in_reverse_mode_only("op", plain_sine, forward_over_reverse=True)
    found = jax.jit(jax.hessian(lambda x: around(plain)(x).sum()))(X)
    assert jnp.allclose(found, -jnp.diag(jnp.sin(X)))
    with pytest.raises(TypeError, match="^op has no forward-mode gradient"):
        jax.jvp(around(plain), (X,), (X,))


def custom_gradients():
    """The names of functions with a `jax.custom_vjp`, by file, and whether they are wrapped."""
    for file in sorted(PACKAGE.rglob("*.py")):
        if "custom_vjp" not in (text := file.read_text()):
            continue
        tree = ast.walk(ast.parse(text))
        made, wrapped = set(), set()
        for node in tree:
            if isinstance(node, ast.FunctionDef):
                if any("custom_vjp" in ast.unparse(each) for each in node.decorator_list):
                    made.add(node.name)
            elif isinstance(node, ast.Assign) and "custom_vjp(" in ast.unparse(node.value):
                made.add(ast.unparse(node.targets[0]))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "in_reverse_mode_only":
                wrapped.add(ast.unparse(node.args[1]))
        assert text.count("jax.custom_vjp") <= len(made) + text.count("`jax.custom_vjp`")
        for name in sorted(made):
            yield f"{file.relative_to(PACKAGE)}:{name}", name in wrapped


@pytest.mark.parametrize(("function", "wrapped"), list(custom_gradients()))
def test_every_custom_gradient_says_so_in_forward_mode(function, wrapped):
    assert wrapped or function in INSIDE_OF_OPS
