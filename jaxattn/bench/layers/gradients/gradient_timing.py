"""Times and memory of a function and its gradient, as `bench train` reports them.

`ms` is the GPU time of the kernels of both passes, from a profile, and `forward ms` that of the
forward pass only; `backward ms` is the difference. `call ms` is the time per call when calls are
dispatched one after another. `forward MiB` and `MiB` are XLA's temporary memory of the forward pass
and of both passes, without arguments and results. Outputs and gradients are results, and the
output's cotangent is an argument.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.bench.harness.timing import kernel_seconds, seconds

MIB = 2**20
CALLS = 8  # calls that are dispatched together

# (differentiated floating-point operands by name, other operands) -> output.
type Differentiated = Callable[[Any, Any], jax.Array]


def value_and_gradient(function: Differentiated) -> Callable[..., Any]:
    """Returns (floats, fixed, cotangent) -> (the output, the gradients of all floats).

    The cotangent is an argument, as it is for PyTorch's libraries, because a loss would add
    kernels.
    """

    def both(floats: Any, fixed: Any, cotangent: jax.Array) -> tuple[jax.Array, Any]:
        out, pull = jax.vjp(lambda floats: function(floats, fixed), floats)
        return out, pull(cotangent.astype(out.dtype))[0]

    return both


class CompiledPass:
    """A function compiled once for its operands."""

    def __init__(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> None:
        self.operands = operands
        self.compiled = jax.jit(function).lower(*operands).compile()

    def __call__(self, number: int = 0) -> Any:
        del number
        return self.compiled(*self.operands)

    @property
    def mebibytes(self) -> float:
        analysis = self.compiled.memory_analysis()
        return 0.0 if analysis is None else analysis.temp_size_in_bytes / MIB

    def loop_seconds(self) -> float:
        def several() -> Any:
            for _ in range(CALLS):
                result = self()
            return result

        return seconds(several, repeats=3) / CALLS

    def kernel_seconds(self) -> float:
        """Kernel seconds per call; without a GPU, seconds per call in a loop."""
        return kernel_seconds(self) or self.loop_seconds()


def gradient_columns(
    function: Differentiated, floats: Any, fixed: Any, cotangent: jax.Array
) -> dict[str, float]:
    """Times in ms, and temporary memory in MiB."""
    forward = CompiledPass(function, (floats, fixed))
    forward_seconds, forward_mebibytes = forward.kernel_seconds(), forward.mebibytes
    del forward
    both = CompiledPass(value_and_gradient(function), (floats, fixed, cotangent))
    both_seconds = both.kernel_seconds()
    return {
        "ms": both_seconds * 1e3,
        "call ms": both.loop_seconds() * 1e3,
        "forward ms": forward_seconds * 1e3,
        "backward ms": (both_seconds - forward_seconds) * 1e3,
        "forward MiB": forward_mebibytes,
        "MiB": both.mebibytes,
    }


def relative_l2(found: Any, reference: Any) -> float:
    """The largest relative L2 error of a gradient."""

    @functools.partial(jax.jit)
    def error(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(b), 1e-30)

    leaves = jax.tree.leaves(found), jax.tree.leaves(reference)
    return max(float(error(a, b)) for a, b in zip(*leaves, strict=True))
