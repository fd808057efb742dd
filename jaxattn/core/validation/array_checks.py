"""Checks of array arguments, which ops and modules make before a kernel starts."""

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxattn.arena import Arena

FLOATS = ("bfloat16", "float16", "float32", "float64")
# A larger window becomes this one: no row is as long, and positions plus a window fit in 32 bits.
MOST_WINDOW = 2**30
LEAST_FLOAT32 = float(np.finfo(np.float32).tiny)  # the smallest normal number
MOST_FLOAT32 = float(np.finfo(np.float32).max)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BoundedLengths:
    """Lengths of rows that are known to be at most `max_length`.

    Ops accept them for `seq_lens`, because otherwise each layer would check traced lengths.

    Attributes:
        lengths: int32 [B].
        max_length: Number of tokens that a row's table can hold.
    """

    lengths: Array
    max_length: int = dataclasses.field(metadata={"static": True})


def keep_concrete(x: Any) -> Any:
    """Keeps concrete numbers concrete: NumPy's and Python's become a NumPy array, others JAX's.

    Inside `jax.jit`, `jnp.asarray` turns both into tracers, whose values no check can read.
    """
    if isinstance(x, BoundedLengths):
        return x
    known = all(
        isinstance(leaf, np.ndarray | np.generic | int | float) for leaf in jax.tree.leaves(x)
    )
    return x if x is None else np.asarray(x) if known else jnp.asarray(x)


def check_array(op: str, name: str, x: Any) -> None:
    """Raises unless x is a JAX, NumPy or flax array that was not deleted.

    Raises:
        TypeError: x is not an array.
        ValueError: x was donated to an earlier call.
    """
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{op}: {name} must be an array, got {type(x).__name__}")
    if not isinstance(x, jax.core.Tracer) and isinstance(x, jax.Array) and x.is_deleted():
        raise ValueError(
            f"{op}: {name} {x.shape} is deleted: it was donated to an earlier call; use the array "
            "that the call returned"
        )


def check_dtype(op: str, name: str, x: Any, *dtypes: str) -> None:
    """Raises TypeError unless the array has one of the dtypes."""
    if str(x.dtype) not in dtypes:
        wanted = " or ".join(dtypes)
        raise TypeError(f"{op}: {name} must be {wanted}, got {x.dtype} {tuple(x.shape)}")


def check_out_dtype(op: str, dtype: Any, default: Any) -> Any:
    """Returns the requested dtype of a result, one of FLOATS; None means `default`.

    Raises:
        TypeError: The dtype is another one, or not a dtype.
    """
    try:
        found = jnp.dtype(default if dtype is None else dtype)
    except TypeError:
        found = dtype
    if str(found) not in FLOATS:
        raise TypeError(f"{op}: dtype must be {' or '.join(FLOATS)}, got {found}")
    return found


def check_integers(op: str, name: str, x: Any, shape: str, *, fits: bool) -> None:
    """Raises TypeError unless the array holds integers, ValueError unless its shape `fits`."""
    message = f"{op}: {name} must be integers of shape {shape}, got {x.dtype}{list(x.shape)}"
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(message)
    if not fits:
        raise ValueError(message)


def is_integer(value: Any) -> bool:
    """Returns whether a value is a Python or NumPy integer, and not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_integer(op: str, name: str, value: Any) -> None:
    """Raises TypeError unless `is_integer`."""
    if not is_integer(value):
        raise TypeError(f"{op}: {name} must be an integer, got {value!r}")


def check_sizes(op: str, *, least: int = 1, **sizes: Any) -> None:
    """Raises ValueError unless each of the named sizes is an integer of at least `least`."""
    for name, size in sizes.items():
        if not is_integer(size) or size < least:
            wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise ValueError(f"{op}: {name} must be {wanted}, got {size!r}")


def check_window(op: str, window: Any) -> int | None:
    """Returns the number of keys that a token sees, at most `MOST_WINDOW`; None means all.

    Raises:
        TypeError: The window is not a Python integer.
        ValueError: The window is below 1.
    """
    if window is None:
        return None
    if not is_integer(window):
        raise TypeError(
            f"{op}: window must be a Python integer or None, got {type(window).__name__}"
        )
    if window < 1:
        raise ValueError(
            f"{op}: window counts the token itself and must be at least 1, got {window}"
        )
    return min(int(window), MOST_WINDOW)


def floats(op: str, **arrays: Any) -> list[Array]:
    """Returns the named arguments as JAX arrays.

    Raises TypeError: An argument is not an array, or does not hold floats.
    """
    for name, x in arrays.items():
        check_array(op, name, x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{op}: {name} must hold floats, got {x.dtype}{list(x.shape)}")
    return [jnp.asarray(x) for x in arrays.values()]


def maybe_floats(op: str, name: str, x: Any) -> Array | None:
    """Does the same as `floats` for an argument that may be None."""
    return None if x is None else floats(op, **{name: x})[0]


def finite(op: str, name: str, value: Any) -> float:
    """Returns a finite number, which must be concrete because kernels are compiled with it.

    Raises:
        TypeError: The value is not a Python number.
        ValueError: The value is not finite in float32.
    """
    value = number_of(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a Python number, got {type(value).__name__}")
    if not abs(value) <= MOST_FLOAT32:
        raise ValueError(f"{op}: {name} must be finite, got {str(value):.40}")
    return float(value)


def check_positive(op: str, name: str, value: int | float | np.floating) -> float:
    """Returns a number above 0 that is also positive and finite in float32, where it is used.

    Raises:
        ValueError: The value is not such a number.
    """
    if isinstance(value, np.floating):
        value = float(value)  # a float16 would round the bounds to 0 and infinity
    if not LEAST_FLOAT32 <= value <= MOST_FLOAT32:
        raise ValueError(
            f"{op}: {name} must be positive and finite, got {str(value):.40}; positive float32 "
            "numbers range from 1.2e-38 to 3.4e38"
        )
    return float(value)


def number_of(value: Any) -> Any:
    """Converts a concrete scalar of NumPy or JAX to a Python number; keeps other values."""
    known = isinstance(value, jax.Array | np.ndarray | np.generic)
    known = known and value.shape == () and not isinstance(value, jax.core.Tracer)
    return value.item() if known and value.dtype.kind in "iuf" else value


def output_scale(op: str, scale: Any, key_dim: int) -> float:
    """Returns the factor of the output; None means Dk**-0.5."""
    return key_dim**-0.5 if scale is None else finite(op, "scale", scale)


def check_features(
    op: str, x: Any, axis: str, name: str, weights: tuple[int, ...], of: int
) -> None:
    """Raises unless `x` is a floating array whose last axis is axis `of` of the named weights."""
    check_array(op, "x", x)
    check_dtype(op, "x", x, *FLOATS)
    if not x.shape or x.shape[-1] != weights[of]:
        raise ValueError(f"{op}: x {tuple(x.shape)} must end in the {axis} of {name} {weights}")


def check_arena(op: str, arena: Any) -> None:
    """Raises TypeError unless the argument is an `Arena` or None."""
    if arena is not None and not isinstance(arena, Arena):
        raise TypeError(
            f"{op}: arena must be an Arena from Arena.allocate(...scratch(...)), got "
            f"{type(arena).__name__}"
        )


def check_layer(op: str, name: str, stack: tuple[int, ...], layer: Any) -> None:
    """Raises unless `layer`, a number or a traced one, is in the stack of that shape."""
    if isinstance(layer, jax.core.Tracer | jax.Array | np.ndarray):
        if layer.shape != () or not jnp.issubdtype(layer.dtype, jnp.integer):
            raise TypeError(
                f"{op}: layer must be an integer scalar, got {layer.dtype} {layer.shape}"
            )
        if isinstance(layer, jax.core.Tracer):
            return
    elif isinstance(layer, bool) or not hasattr(layer, "__index__"):
        raise TypeError(f"{op}: layer must be an integer, got {type(layer).__name__}")
    if not 0 <= operator.index(layer) < stack[0]:
        raise ValueError(
            f"{op}: layer={int(layer)} is out of range: {name} {stack} has {stack[0]} layers"
        )
