"""Dispatch of an op: the first implementation that accepts the arguments, or the requested one.

An implementation refuses a call by raising `Refusal` with the reason before it traces. Any other
error, including JAX's `NotImplementedError`, is an error of the call. If a GPU's kernel refuses and
another implementation runs instead, a warning at the caller's line says so.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxattn.core import package_path
from jaxattn.core.reverse_mode import in_reverse_mode_only

Implementation = Literal["mosaic_gpu", "mosaic_gpu_interpret", "xla"]

# Runs only on request: the Mosaic GPU kernel under JAX's interpreter, slowly, on any device. The
# interpreter needs a host thread for each thread of the kernel. On a machine with few cores set the
# environment variable PJRT_NPROC=16 before importing JAX, or it may deadlock.
ONLY_BY_NAME = ("mosaic_gpu_interpret",)
PACKAGE = str(package_path.PACKAGE) + os.sep
JAX = os.path.dirname(jax.__file__) + os.sep


# With `traced_for_hopper(True)`, tracing chooses the ops of a Hopper GPU on any device. Use the
# context only for shapes, because the traced code can run only on such a GPU. The context is part
# of JAX's trace cache key, so JAX does not reuse a trace from outside.
traced_for_hopper = jax.make_user_context(default_value=False)
# With `kernels_untraced(True)`, a traced kernel has operands and results, but no body. Use the
# context only to count a step's memory, since the code cannot run. Bodies take three quarters of
# the tracing time.
kernels_untraced = jax.make_user_context(default_value=False)


class Refusal(NotImplementedError):
    """An implementation does not support these arguments on this machine; the message says why."""


def dispatch[T](
    op: str, implementation: Implementation | None, candidates: Mapping[str, Callable[[], T]]
) -> T:
    """Runs the requested candidate, or for `None` the first one that does not refuse.

    Args:
        op: The op's public name, for messages.
        implementation: Name of a candidate, or `None` for the best available.
        candidates: Maps names to thunks, best first.

    Raises:
        ValueError: No candidate has that name.
        Refusal: The requested implementation does not support this call; the message says why.
        ExceptionGroup: `implementation` is `None` and every candidate refuses.
    """
    if implementation is not None:
        if implementation not in candidates:
            names = ", ".join(repr(name) for name in candidates)
            raise ValueError(f"{op}: unknown {implementation=}; choose one of {names} or None")
        try:
            return candidates[implementation]()
        except Refusal as refusal:
            if implementation != "xla" and "xla" in candidates:
                refusal.args = (f"{refusal}; use implementation='xla'",)
            raise
    refusals: list[Exception] = []
    for name, candidate in candidates.items():
        if name in ONLY_BY_NAME:
            continue
        try:
            result = candidate()
        except Refusal as refusal:
            refusal.add_note(f"implementation={name!r}")
            refusals.append(refusal)
            continue
        if refusals and jax.default_backend() == "gpu":
            warn_of_xla(f"{op}: {name!r} runs instead of the GPU's kernel: {refusals[0]}")
        return result
    raise ExceptionGroup(f"{op}: no implementation accepts these arguments", refusals)


def warn_of_xla(message: str) -> None:
    """Warns, at the caller's line, that XLA computes something instead of a kernel.

    Python shows a message once per line. JAX's own frames are skipped, because JAX calls the
    backward pass.
    """
    warnings.warn(message, skip_file_prefixes=(PACKAGE, JAX))


def warn_of_gradient(because: str) -> None:
    """Warns, on a GPU, that XLA computes a gradient."""
    if jax.default_backend() == "gpu" or traced_for_hopper.value:
        warn_of_xla(f"XLA computes the gradient: {because}")


def dispatch_kernel[T](
    op: str,
    implementation: Implementation | None,
    kernel: Callable[[bool], T],
    xla: Callable[[], T],
) -> T:
    """Runs an op that has a Mosaic GPU kernel; chooses and raises as `dispatch` does.

    Args:
        kernel: Runs the kernel; its argument is whether to use JAX's interpreter.
    """
    named: dict[str, Callable[[], T]] = {
        "mosaic_gpu": lambda: kernel(False),
        "mosaic_gpu_interpret": lambda: kernel(True),
        "xla": xla,
    }
    return dispatch(op, implementation, named)


def dispatch_xla[T](op: str, implementation: Implementation | None, xla: Callable[[], T]) -> T:
    """Runs an op without a kernel; requesting a kernel by name raises `Refusal`."""

    def refuse() -> T:
        raise Refusal(f"{op} has no Mosaic GPU kernel")

    named = {"mosaic_gpu": refuse, "mosaic_gpu_interpret": refuse} if implementation else {}
    return dispatch(op, implementation, {**named, "xla": xla})


def with_gradient_of(
    reference: Callable[..., Any], function: Callable[..., Any], *, because: str
) -> Any:
    """Gives `function` the gradient of `reference`, in reverse mode only.

    Args:
        because: The op, and the reason why XLA computes the gradient although the op's gradient may
            have a kernel. A warning on GPUs contains it.
    """
    differentiable = jax.custom_vjp(function)

    def backward(arguments, cotangents):
        warn_of_gradient(because)
        return jax.vjp(reference, *arguments)[1](cotangents)

    differentiable.defvjp(lambda *arguments: (function(*arguments), arguments), backward)
    op = because.partition(":")[0]
    return in_reverse_mode_only(op, differentiable, instead="pass implementation='xla'")


def gradient_or_xla[T](
    kernel: Callable[..., T], xla: Callable[..., T], operands: tuple[Any, ...]
) -> T:
    """Returns a gradient by its kernel, or by XLA with a warning if the kernel refuses.

    Args:
        operands: Arguments of both functions. If the first array is empty, nothing is said.
    """
    try:
        return kernel(*operands)
    except Refusal as refusal:
        if operands[0].size:
            warn_of_gradient(str(refusal))
        return xla(*operands)


def without_gradient[T](
    op: str, operands: T, names: str | None = None, *, train_with: str | None = None
) -> T:
    """Returns the operands of a kernel without a gradient, so that differentiation raises.

    Args:
        op: The op's public name, for the message.
        operands: Arrays, or a tree of them; None counts as no array.
        names: Names of the operands' arguments, separated by spaces, one each.
        train_with: The public op that has a gradient.

    Raises:
        NotImplementedError: Raised later, when JAX differentiates a result that depends on an
            operand. The error is not a `Refusal`, because inside `jax.jit` the implementation was
            chosen long before.
    """
    instead = f"train with {train_with}, or " if train_with else ""

    def held(x: Any, name: str | None) -> Any:
        if not (hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)):
            return x

        @jax.custom_jvp
        def same(x: jax.Array) -> jax.Array:
            return x

        @same.defjvp
        def refuse(primals: Any, tangents: Any) -> Any:
            of = f" of {name}" if name else ""
            raise NotImplementedError(
                f"{op}: the kernel has no gradient{of}; {instead}pass implementation='xla' to "
                "differentiate"
            )

        return same(x)

    if names is None:
        return jax.tree.map(lambda x: held(x, None), operands)
    parts: Any = operands
    found = tuple(
        jax.tree.map(lambda x, name=name: held(x, name), part)
        for part, name in zip(parts, names.split(), strict=True)
    )
    return found  # type: ignore[return-value]
