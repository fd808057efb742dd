"""Operations outside of `jax.jit` that only move or convert numbers, computed by NumPy.

XLA compiles a program for each such operation and each new shape, which takes about 25 ms with
tracing and lowering. These were half of the suite's programs. NumPy gives the same bits. Results
are copied into memory that XLA owns, because steps may donate them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MOST_BYTES = 2**22  # of a result; XLA runs larger ones
_FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(jnp.bfloat16))


def _stage(x: np.ndarray) -> np.ndarray:
    return x


def _convert(x: np.ndarray, *, new_dtype: Any, **_: Any) -> np.ndarray | None:
    """Not for floats to integers or bools, where NumPy and XLA differ for NaN and subnormals."""
    exact = x.dtype == new_dtype or x.dtype.kind in "biu" or x.dtype == bool
    if not exact and not (x.dtype in _FLOATS and new_dtype in _FLOATS):
        return None
    with np.errstate(all="ignore"):
        return x.astype(new_dtype)


def _dynamic_slice(x: np.ndarray, *starts: np.ndarray, slice_sizes: Any) -> np.ndarray:
    begins = [
        min(max(int(start), 0), dim - size)
        for start, dim, size in zip(starts, x.shape, slice_sizes, strict=True)
    ]
    ends = map(sum, zip(begins, slice_sizes, strict=True))
    return x[tuple(map(slice, begins, ends))]


def _slice(x: np.ndarray, *, start_indices: Any, limit_indices: Any, strides: Any) -> np.ndarray:
    steps = strides or (None,) * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


def _broadcast(x: np.ndarray, *, shape: Any, broadcast_dimensions: Any, **_: Any) -> np.ndarray:
    dims = [1] * len(shape)
    for dim, size in zip(broadcast_dimensions, x.shape, strict=True):
        dims[dim] = size
    return np.broadcast_to(x.reshape(dims), shape)


def _reshape(x: np.ndarray, *, new_sizes: Any, dimensions: Any, **_: Any) -> np.ndarray | None:
    return None if dimensions is not None else x.reshape(new_sizes)


MOVES: dict[str, Callable[..., np.ndarray | None]] = {
    "stage_p": _stage,
    "convert_element_type_p": _convert,
    "dynamic_slice_p": _dynamic_slice,
    "slice_p": _slice,
    "broadcast_in_dim_p": _broadcast,
    "reshape_p": _reshape,
    "squeeze_p": lambda x, *, dimensions: np.squeeze(x, tuple(dimensions)),
    "transpose_p": lambda x, *, permutation: np.transpose(x, permutation),
    "concatenate_p": lambda *each, dimension: np.concatenate(each, dimension),
}


def use_numpy_moves() -> None:
    """Enables this in a process on a CPU, unless JAX has moved the replaced functions."""
    try:
        from jax._src import core, literals, mesh
        from jax._src.interpreters import pxla
        from jax._src.lax import lax, slicing
        from jax._src.lib import xla_client

        copies = xla_client.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
        put = xla_client.batched_device_put
        primitives = {
            getattr(lax, name, None) or getattr(slicing, name): move for name, move in MOVES.items()
        }
        pxla.batched_device_put  # noqa: B018
    except (ImportError, AttributeError):
        return
    device = jax.devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device)

    def number(x: Any) -> np.ndarray | None:
        """An argument that is only on the default device, in a dtype that JAX keeps; else None."""
        if type(x) is literals.TypedNdArray:
            x = np.asarray(x)
        elif isinstance(x, jax.Array):
            if isinstance(x, core.Tracer) or not isinstance(x.dtype, np.dtype) or x.is_deleted():
                return None
            if x.committed or x.sharding.device_set != {device}:
                return None
            return np.asarray(x)
        elif not isinstance(x, np.ndarray):
            return None
        return x if x.dtype == jax.dtypes.canonicalize_dtype(x.dtype) else None

    def replace(primitive: Any, move: Callable[..., np.ndarray | None]) -> None:
        compiled = primitive.impl

        def impl(*args: Any, **params: Any) -> Any:
            given = None
            usual = jax.config.jax_default_device is None and not jax.config.jax_disable_jit
            if args and usual and params.get("sharding") is None:
                given = [number(x) for x in args]
            if not given or any(x is None for x in given) or not mesh.get_abstract_mesh().empty:
                return compiled(*args, **params)
            if any(x.dtype == jax.dtypes.float0 for x in given):
                return compiled(*args, **params)
            avals = map(core.typeof, args)
            staged = move is _stage
            aval = next(avals) if staged else primitive.abstract_eval(*avals, **params)[0]
            if aval.size * aval.dtype.itemsize > MOST_BYTES:
                return compiled(*args, **params)
            found = move(*given, **params)
            if found is None:
                return compiled(*args, **params)
            found = np.ascontiguousarray(found).reshape(aval.shape)
            return put(
                aval, sharding, [found], [device], committed=False, force_copy=True,
                host_buffer_semantics=copies,
            )  # fmt: skip

        primitive.def_impl(impl)

    for primitive, move in primitives.items():
        replace(primitive, move)
