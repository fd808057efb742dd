"""Mesh axes inside `jax.shard_map`: arrays made to vary over the same, and Explicit ones refused.

Inside `jax.shard_map` the carries of a loop vary over the mesh axes its operands vary over. There
an array's type says over which axes it varies. Operators take arrays of several such types. A loop
wants one type of its carry, before and after, and a condition one of its branches. A custom
gradient has its primal's. But zeros that a loop starts from vary over nothing, and a weight that
all devices share over less than the tokens do.
"""

from typing import Any

import jax
from jax import lax


def match_varying_axes[T](tree: T, *others: Any) -> T:
    """`tree`, its arrays varying over every axis that any of them or of `others` varies over.

    The gradient of an array that varied over less is summed over the axes added, here and once. So
    this comes before a loop, a condition or a custom gradient, not in it. Devices may differ in
    which branch of a condition they take, and a sum in one of them would wait for the rest.

    Outside of `shard_map`, and with its `check_vma=False`, nothing varies and `tree` comes back as
    it is.
    """
    axes = frozenset[Any]().union(*(_axes(x) for x in jax.tree.leaves((tree, others))))

    def widened(x: Any) -> Any:
        return lax.pcast(x, tuple(sorted(axes - _axes(x), key=str)), to="varying")

    return jax.tree.map(widened, tree)


def _axes(x: Any) -> frozenset[Any]:
    return jax.typeof(x).manual_axis_type.varying


def refuse_explicit_axes(op: str, *arrays: Any) -> None:
    """Raises TypeError where an array is split over an Explicit axis of a mesh.

    Inside `shard_map` none is. Outside, each gather has to say how its result is split, and sorts
    and Pallas kernels cannot. JAX would name the gather, which no caller of the op has written.
    """
    for x in jax.tree.leaves(arrays):
        sharding = jax.typeof(x).sharding
        explicit = set(sharding.mesh.explicit_axes)
        split = explicit.intersection(jax.tree.leaves(tuple(sharding.spec)))
        if split:
            axes = ", ".join(repr(axis) for axis in sorted(split, key=str))
            raise TypeError(
                f"{op}: an argument of shape {tuple(x.shape)} is split over the mesh axis {axes} "
                "of type Explicit, the default of jax.make_mesh; pass "
                "axis_types=(jax.sharding.AxisType.Auto,) for each axis to jax.make_mesh, or "
                "call the op inside jax.shard_map"
            )
