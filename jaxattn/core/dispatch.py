"""Dispatch of an op: the first implementation that accepts the arguments, or the named one.

An implementation refuses by raising `Refusal` with its reason before it traces. Any other error, a
`NotImplementedError` of JAX's included, is an error of the call. Where a GPU's kernel refuses and
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

# Runs only when it is named: the Mosaic GPU kernel under JAX's interpreter, on any device, slowly.
# It needs a host thread for each thread of the kernel: on a machine of few cores set the
# environment variable PJRT_NPROC=16 before JAX is imported, or it may wait for ever.
ONLY_BY_NAME = ("mosaic_gpu_interpret",)
PACKAGE = str(package_path.PACKAGE) + os.sep
JAX = os.path.dirname(jax.__file__) + os.sep


# With `traced_for_hopper(True)`, ops that are traced choose what a Hopper GPU runs, whatever device
# is there. For shapes alone: what was traced so can run on such a GPU only. JAX knows of it, and
# takes no trace from outside.
traced_for_hopper = jax.make_user_context(default_value=False)
# With `kernels_untraced(True)`, a kernel that is traced is its operands and results, without its
# body: for what a step takes, and nothing that runs. Bodies are three quarters of a trace's time.
kernels_untraced = jax.make_user_context(default_value=False)


class Refusal(NotImplementedError):
    """An implementation does not serve these arguments on this machine; the message says why."""


def dispatch[T](
    op: str, implementation: Implementation | None, candidates: Mapping[str, Callable[[], T]]
) -> T:
    """Runs the named candidate, or with `None` the first that does not refuse.

    Args:
        op: the op's public name, for messages.
        implementation: one of the candidates' names, or `None` for the best.
        candidates: name -> thunk, best first.

    Raises:
        ValueError: no candidate has that name.
        Refusal: the named implementation refuses; the message says why.
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
            warn_of_xla(f"{op}: {name!r} runs instead of the GPU kernel: {refusals[0]}")
        return result
    raise ExceptionGroup(f"{op}: no implementation accepts these arguments", refusals)


def warn_of_xla(message: str) -> None:
    """Warns at the caller's line that XLA computes what a kernel was expected to.

    Python shows a message of a line once. JAX's own frames are skipped: it is JAX that calls a
    backward pass.
    """
    warnings.warn(message, skip_file_prefixes=(PACKAGE, JAX))


def warn_of_gradient(because: str) -> None:
    """Warns, where a GPU is differentiated on, that XLA computes a gradient."""
    if jax.default_backend() == "gpu" or traced_for_hopper.value:
        warn_of_xla(f"XLA computes the gradient: {because}")


def dispatch_kernel[T](
    op: str,
    implementation: Implementation | None,
    kernel: Callable[[bool], T],
    xla: Callable[[], T],
) -> T:
    """Runs an op that has a Mosaic GPU kernel. It chooses and raises as `dispatch` does.

    Args:
        kernel: takes whether JAX's interpreter runs it.
    """
    named: dict[str, Callable[[], T]] = {
        "mosaic_gpu": lambda: kernel(False),
        "mosaic_gpu_interpret": lambda: kernel(True),
        "xla": xla,
    }
    return dispatch(op, implementation, named)


def dispatch_xla[T](op: str, implementation: Implementation | None, xla: Callable[[], T]) -> T:
    """Runs an op that has no kernel; a kernel that is asked for by name is refused."""

    def refuse() -> T:
        raise Refusal(f"{op} has no Mosaic GPU kernel")

    named = {"mosaic_gpu": refuse, "mosaic_gpu_interpret": refuse} if implementation else {}
    return dispatch(op, implementation, {**named, "xla": xla})


def with_gradient_of(
    reference: Callable[..., Any], function: Callable[..., Any], *, because: str
) -> Any:
    """`function`, differentiated as `reference` of the same arguments, in reverse mode only.

    Args:
        because: the op, and the reason why an op whose gradient has a kernel is differentiated so;
            a warning names it where a GPU is differentiated on.
    """
    differentiable = jax.custom_vjp(function)

    def backward(arguments, cotangents):
        warn_of_gradient(because)
        return jax.vjp(reference, *arguments)[1](cotangents)

    differentiable.defvjp(lambda *arguments: (function(*arguments), arguments), backward)
    op = because.partition(":")[0]
    return in_reverse_mode_only(op, differentiable, instead="pass implementation='xla'")


def without_gradient[T](
    op: str, operands: T, names: str | None = None, *, train_with: str | None = None
) -> T:
    """The operands of a kernel that has no gradient, none of which may be differentiated.

    Args:
        op: the op's public name, for the message.
        operands: arrays, or a tree of them; None is no array.
        names: of the arguments that the operands are, a name for each.
        train_with: the public op that has a gradient.

    Raises:
        NotImplementedError: later, where JAX differentiates what depends on one of them. It is no
            `Refusal`: inside `jax.jit` the implementation was chosen long before.
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
