"""Shapes of arrays, from a line of text for each op and the sizes of a case.

    x[B,F] layer:i32[]?layer weights:e4m3[*L,_,F]@sizes

means x of the case's dtype, a layer if the size `layer` is neither 0 nor missing, and one matrix
for each of `sizes`, which replaces `_`. A dtype is one of DTYPES, or the name of a size with the
dtype. Dims are expressions of sizes: B rows of T tokens; H heads, Hk key and Hv value heads, of D,
Dk and Dv dims; tables of P pages, N pages of C tokens; Z slots, S packed sequences; F features; and
`*L` for the layer axis of a stack, if there is one.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

Shapes = dict[str, Any]

DTYPES = {"f32": "float32", "i32": "int32", "u8": "uint8", "e4m3": "float8_e4m3fn"}
# Defaults of sizes that a case may omit. A dtype of None is the case's.
DEFAULTS: dict[str, Any] = {
    "C": 64, "Dk": 128, "Dv": 128, "L": 0, "S": 0, "taps": 4, "nope": 128, "rope": 64,
    "rank": 512, "W": 0, "gated": False, "channels": False, "rotated": 0, "state": "float32",
    "cache": None, "gates": None,
}  # fmt: skip
ARRAY = re.compile(r"(\w+)(?::(\w+))?\[([^]]*)\](?:@(\w+))?(?:\?(\w+))?")


def shapes(text: str, dtype: str, given: Mapping[str, Any]) -> Shapes:
    """The arrays of a line by name, in the same order.

    Args:
        dtype: The case's dtype.
        given: The case's sizes.
    """
    sizes = {**DEFAULTS, **given}
    stored = "float8_e4m3fn" if sizes.get("fp8") else dtype
    dtypes = DTYPES | {"fp8": stored, "": dtype}
    scope = sizes | {
        "L": (sizes["L"],) if sizes["L"] else (),
        "channels": (sizes["Dk"],) if sizes["channels"] else (),
        "blocks": lambda size: -(-size // 128),
        "max": max,
    }

    def array(kind: str, dims: str, **more: Any) -> jax.ShapeDtypeStruct:
        of_size = dtypes[kind] if kind in dtypes else sizes[kind] or dtype
        shape = eval(f"({dims},)" if dims else "()", {"__builtins__": {}}, scope | more)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(of_size))

    found: Shapes = {}
    for name, kind, dims, each, needed in ARRAY.findall(text):
        if needed and not sizes.get(needed):
            continue
        if each and isinstance(sizes[each], tuple):
            found[name] = tuple(array(kind, dims, _=size) for size in sizes[each])
        else:
            found[name] = array(kind, dims, _=sizes.get(each))
    return found
