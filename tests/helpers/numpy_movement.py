"""Slices, reshapes and conversions by NumPy: XLA compiles a program for each new shape of them.

Half of the programs that tests compile only move numbers, one operation each: `x[3]`, `x.astype`,
`jnp.zeros`. A program takes some 15 ms, and NumPy 50 us for the same bytes. What an engine, a
server or a command does is compiled as ever: tests count what an engine compiles.
"""

import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

PACKAGE = os.path.join(os.path.dirname(__file__), "..", "..", "jaxattn")
COUNTED = tuple(
    os.path.normpath(os.path.join(PACKAGE, name)) + os.sep
    for name in ("bench", "cli", "engine", "server", "train")
)
FLOATS = {jnp.dtype(name) for name in ("float16", "bfloat16", "float32", "float64")}
PARTS = {jnp.dtype(name) for name in ("int4", "uint4", "float4_e2m1fn")}  # of a byte
WHOLE = "biu"  # kinds of dtypes without fractions


class Elsewhere(Exception):
    """What XLA has to compute."""


def _converted(x: np.ndarray, *, new_dtype: Any, weak_type: bool, sharding: Any) -> np.ndarray:
    """Where NumPy rounds as XLA does: not from floats to integers, nor of eight bits."""
    to = np.dtype(new_dtype)
    exact = x.dtype in FLOATS and (to in FLOATS or to.kind == "b")
    if not (exact or x.dtype.kind in WHOLE and (to in FLOATS or to.kind in WHOLE)):
        raise Elsewhere
    if weak_type or sharding is not None:
        raise Elsewhere
    with np.errstate(all="ignore"):
        return x.astype(to)


def _reshaped(x: np.ndarray, *, new_sizes: Any, dimensions: Any, sharding: Any) -> np.ndarray:
    if dimensions is not None or sharding is not None:
        raise Elsewhere
    return x.reshape(new_sizes)


def _broadcast(
    x: np.ndarray, *, shape: Any, broadcast_dimensions: Any, sharding: Any
) -> np.ndarray:
    if sharding is not None:
        raise Elsewhere
    sizes = [1] * len(shape)
    for place, axis in enumerate(broadcast_dimensions):
        sizes[axis] = x.shape[place]
    return np.broadcast_to(x.reshape(sizes), shape)


def _sliced(x: np.ndarray, *, start_indices: Any, limit_indices: Any, strides: Any) -> np.ndarray:
    steps = strides or (1,) * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


def _seen_as(x: np.ndarray, *, new_dtype: Any) -> np.ndarray:
    to = np.dtype(new_dtype)
    if to.itemsize != x.dtype.itemsize or {to, x.dtype} & PARTS:
        raise Elsewhere
    return x.view(to)


def _cut(x: np.ndarray, *begins: np.ndarray, slice_sizes: Any) -> np.ndarray:
    if len(begins) != x.ndim:
        raise Elsewhere
    first = [
        min(max(int(begin), 0), size - cut)
        for begin, size, cut in zip(begins, x.shape, slice_sizes, strict=True)
    ]
    return x[tuple(slice(at, at + cut) for at, cut in zip(first, slice_sizes, strict=True))]


MOVES: dict[Any, Callable[..., np.ndarray]] = {
    lax.convert_element_type_p: _converted,
    lax.bitcast_convert_type_p: _seen_as,
    lax.reshape_p: _reshaped,
    lax.broadcast_in_dim_p: _broadcast,
    lax.slice_p: _sliced,
    lax.dynamic_slice_p: _cut,
    lax.squeeze_p: lambda x, *, dimensions: x.squeeze(tuple(dimensions)),
    lax.transpose_p: lambda x, *, permutation: x.transpose(permutation),
    lax.concatenate_p: lambda *each, dimension: np.concatenate(each, dimension),
}


def _counted(frame: FrameType | None, known: dict[CodeType, bool]) -> bool:
    """Whether a part of the package calls whose compiled programs tests count."""
    while frame is not None:
        code = frame.f_code
        if code not in known:
            known[code] = os.path.normpath(code.co_filename).startswith(COUNTED)
        if known[code]:
            return True
        frame = frame.f_back
    return False


def move_by_numpy() -> None:
    """For the whole process. Where JAX has moved what this replaces, it stays as it is."""
    try:
        from jax._src.array import ArrayImpl
    except ImportError:
        return
    known: dict[CodeType, bool] = {}
    [device] = jax.devices()[:1]

    def host(x: Any) -> np.ndarray:
        """Of one array that lies where all do; of an index also NumPy's."""
        if isinstance(x, ArrayImpl):
            if x.aval.weak_type or x.sharding.device_set != {device}:
                raise Elsewhere
            if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
                raise Elsewhere
            return np.asarray(x)
        if isinstance(x, np.integer | np.ndarray) and x.dtype == np.int32:
            return np.asarray(x)
        raise Elsewhere

    def moving(primitive: Any, move: Callable[..., np.ndarray]) -> Callable[..., Any]:
        compiled = primitive.impl

        def moved(*arguments: Any, **options: Any) -> Any:
            if jax.config.jax_default_device is None and not _counted(sys._getframe(1), known):
                try:
                    # A copy: whatever lends its memory may be donated.
                    found = np.array(move(*map(host, arguments), **options), order="C")
                    bound = any(getattr(x, "committed", False) for x in arguments)
                    return jax.device_put(found, device if bound else None)
                except Elsewhere:
                    pass
            return compiled(*arguments, **options)

        return moved

    for primitive, move in MOVES.items():
        primitive.def_impl(moving(primitive, move))
