"""Mesh axes inside `jax.shard_map`: unifies varying axes, and rejects Explicit axes.

Inside `jax.shard_map` an array's type contains the axes over which it varies. Operators accept
arrays of several such types. A loop, however, needs one type for its carry before and after, a
condition one for its branches, and a custom gradient that of its primal. Zeros from which a loop
starts vary over no axis, and a weight that all devices share varies over fewer axes than the
tokens.
"""

from typing import Any

import jax
from jax import lax


def match_varying_axes[T](tree: T, *others: Any) -> T:
    """Returns `tree` with its arrays varying over all axes of any of them or of `others`.

    The gradient of an array that varied over fewer axes is summed over the added ones, once, here.
    Call this function before a loop, a condition or a custom gradient, not inside it. Devices may
    take different branches of a condition, and a sum in one branch would wait for the others.

    Outside `shard_map`, and with its `check_vma=False`, nothing varies, and `tree` is returned
    unchanged.
    """
    axes = frozenset[Any]().union(*(_axes(x) for x in jax.tree.leaves((tree, others))))

    def widened(x: Any) -> Any:
        return lax.pcast(x, tuple(sorted(axes - _axes(x), key=str)), to="varying")

    return jax.tree.map(widened, tree)


def _axes(x: Any) -> frozenset[Any]:
    return jax.typeof(x).manual_axis_type.varying


def refuse_explicit_axes(op: str, *arrays: Any) -> None:
    """Raises TypeError if an array is sharded over an Explicit axis of a mesh.

    Inside `shard_map` none is. Outside, each gather must specify its result's sharding, and sorts
    and Pallas kernels cannot. JAX's error would name the gather, which the op's caller did not
    write.
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
