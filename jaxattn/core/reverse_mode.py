"""Functions with a gradient in reverse mode only, and an error that says so in forward mode.

JAX's error for a `jax.custom_vjp` in forward mode names nothing. Here each operand passes through
an identity. Reverse mode transposes the identity's tangent without computing it. Forward mode does
compute it, and gets an error with the op, the argument and the alternative.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def _refuse(*operands: Any, message: str) -> NoReturn:
    raise TypeError(message)


tangent_p = Primitive("reverse_mode_tangent")
tangent_p.def_impl(_refuse)
tangent_p.def_abstract_eval(lambda tangent, *, message: tangent)
mlir.register_lowering(tangent_p, _refuse)
batching.defvectorized(tangent_p)
ad.deflinear2(tangent_p, lambda cotangent, tangent, *, message: [cotangent])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _operand(message: str, forward_over_reverse: bool, x: jax.Array) -> jax.Array:
    return x


@_operand.defjvp
def _operand_jvp(
    message: str, forward_over_reverse: bool, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    # The identity again, so that forward mode of a gradient raises the same error.
    operand = x if forward_over_reverse else _operand(message, forward_over_reverse, x)
    return operand, tangent_p.bind(tangent, message=message)


def in_reverse_mode_only[**P, T](
    op: str, function: Callable[P, T], *, instead: str = "", forward_over_reverse: bool = False
) -> Callable[P, T]:
    """Returns `function` with an error in forward mode that names an alternative.

    Args:
        op: The public name of the function, for the message, which also names its parameters.
        function: A `jax.custom_vjp`, or a function that contains one.
        instead: The alternative with a forward-mode gradient: "pass implementation='xla'".
        forward_over_reverse: Whether forward mode of the gradient works, as `jax.hessian` uses it,
            because both passes of `function` are JAX operations.

    Raises:
        TypeError: `jax.jvp`, `jax.jacfwd` or `jax.linearize` computes the tangent of an operand. In
            `jax.jit` the error is raised when JAX lowers the program.
    """
    instead = f", or {instead}" if instead else ""

    def said(of: str = "") -> str:
        return (
            f"{op} has no forward-mode gradient{of} (jax.jvp, jax.jacfwd, jax.linearize); use "
            f"jax.grad or jax.vjp{instead}"
        )

    names = list(inspect.signature(function).parameters)

    def held(path: Any, x: Any) -> Any:
        if not (isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.floating)):
            return x
        name = names[min(path[0].idx, len(names) - 1)]
        field = jax.tree_util.keystr(path[1:])
        return _operand(said(f" of {field.removeprefix('.') or name}"), forward_over_reverse, x)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        operands: Any = jax.tree_util.tree_map_with_path(held, args)
        try:
            return function(*operands, **kwargs)
        except TypeError as error:  # JAX's own, which under `jax.vmap` comes before the operand's
            if "forward-mode autodiff" not in str(error):
                raise
            raise TypeError(said()) from error

    return run
