"""Single JAX operations that only move numbers, done by NumPy.

`x[0]`, `jnp.asarray` or `reshape` outside of `jax.jit` is a program of its own for each shape:
some 15 ms to trace and compile it, for a copy. NumPy copies the same bytes in 0.2 ms. Shapes,
dtypes and errors are JAX's own. Where arrays are on several devices, or were put on one, JAX does
it. So it does in tests of engines, which count what is compiled.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def _dynamic_slice(x: np.ndarray, *starts: Any, slice_sizes: Any) -> np.ndarray:
    """A start beyond the last that fits is that one, as XLA has it."""
    limits = zip(starts, slice_sizes, x.shape, strict=True)
    begun = [(max(0, min(int(start), of - size)), size) for start, size, of in limits]
    return x[tuple(slice(start, start + size) for start, size in begun)]


def _convert(x: np.ndarray, *, new_dtype: Any, **_: Any) -> np.ndarray:
    return x.astype(new_dtype)


def _keeps_numbers(before: Any, after: Any) -> bool:
    """Whether a conversion rounds nothing; how XLA rounds is XLA's."""
    if before == after:
        return True
    if after == np.float32 and before in (jax.numpy.bfloat16, jax.numpy.float8_e4m3fn):
        return True
    builtin = before.kind in "biuf" and after.kind in "biuf"
    return builtin and np.can_cast(before, after, "safe")


def _slice(x: np.ndarray, *, start_indices: Any, limit_indices: Any, strides: Any) -> np.ndarray:
    return x[tuple(map(slice, start_indices, limit_indices, strides or [1] * x.ndim))]


def _squeeze(x: np.ndarray, *, dimensions: Any) -> np.ndarray:
    return x.squeeze(tuple(dimensions))


def _reshape(x: np.ndarray, *, new_sizes: Any, **_: Any) -> np.ndarray:
    return x.reshape(new_sizes)


def _broadcast(x: np.ndarray, *, shape: Any, broadcast_dimensions: Any, **_: Any) -> np.ndarray:
    ones = [1] * len(shape)
    for place, size in zip(broadcast_dimensions, x.shape, strict=True):
        ones[place] = size
    return np.broadcast_to(x.reshape(ones), shape)


def _concatenate(*arrays: np.ndarray, dimension: int) -> np.ndarray:
    return np.concatenate(arrays, dimension)


def _transpose(x: np.ndarray, *, permutation: Any) -> np.ndarray:
    return x.transpose(permutation)


FEW = 20  # calls of the same shape, behind which a program is worth its time


def _by_numpy(primitive: Any, move: Callable[..., np.ndarray]) -> None:
    """Puts `move` before what JAX does for a primitive outside of a trace."""
    from jax._src import core
    from jax._src.array import ArrayImpl
    from jax._src.lib import _jax, xla_client
    from jax._src.literals import TypedNdArray

    # Into memory of its own, as of a program: JAX may take that over, and nothing else holds it.
    copied = _jax.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
    compiled = primitive.impl
    device = jax.devices()[0]
    single = jax.sharding.SingleDeviceSharding(device)

    def movable(x: Any) -> bool:
        if isinstance(x, np.ndarray | np.generic | TypedNdArray | int):
            return not isinstance(x, bool)
        return (
            isinstance(x, ArrayImpl)
            and x.sharding == single
            and not x.committed
            and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
        )

    calls: Counter[Any] = Counter()

    def moved(*args: Any, **params: Any) -> Any:
        ours = (
            all(map(movable, args))
            and isinstance(args[0], np.ndarray | TypedNdArray | ArrayImpl)
            and (primitive.name == "squeeze" or params.get("dimensions") is None)
            and params.get("sharding") is None
            and jax.config.jax_default_device is None
        )
        if "new_dtype" in params and ours:
            ours = _keeps_numbers(args[0].dtype, np.dtype(params["new_dtype"]))
        if not ours:
            return compiled(*args, **params)
        avals = list(map(core.typeof, args))
        result = (
            avals[0] if primitive is core.stage_p else primitive.abstract_eval(*avals, **params)[0]
        )
        called = (result.str_short(), *(aval.shape for aval in avals))
        calls[called] += 1
        if calls[called] > FEW:
            return compiled(*args, **params)
        numbers = move(*map(np.asarray, args), **params)
        numbers = np.asarray(numbers, result.dtype, order="C")
        return xla_client.batched_device_put(
            result, single, [numbers], [device], False,
            force_copy=True, host_buffer_semantics=copied, enable_x64=True,
        )  # fmt: skip

    primitive.def_impl(moved)


def move_by_numpy() -> Callable[[], None]:
    """Begins it for the whole process; what it returns ends it."""
    from jax._src import core
    from jax._src.lax import lax, slicing

    # `stage` is what makes an array of NumPy's an array of JAX's.
    moves: dict[Any, Callable[..., np.ndarray]] = {
        core.stage_p: lambda x: x,
        slicing.slice_p: _slice,
        slicing.dynamic_slice_p: _dynamic_slice,
        lax.convert_element_type_p: _convert,
        lax.squeeze_p: _squeeze,
        lax.reshape_p: _reshape,
        lax.broadcast_in_dim_p: _broadcast,
        lax.copy_p: lambda x: x,
        lax.concatenate_p: _concatenate,
        lax.transpose_p: _transpose,
    }
    before = [(primitive, primitive.impl) for primitive in moves]
    for primitive, move in moves.items():
        _by_numpy(primitive, move)

    def end() -> None:
        for primitive, impl in before:
            primitive.def_impl(impl)

    return end
