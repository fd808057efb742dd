"""Inside `jax.shard_map`: the carries of a loop vary over the mesh axes its operands vary over.

There an array's type says over which axes it varies. Operators take arrays of several such types;
a loop wants one of its carry, before and after, a condition one of its branches, and a custom
gradient has that of its primal. But zeros that a loop starts from vary over nothing, and a weight
that all devices share over less than the tokens do.
"""

from typing import Any

import jax
from jax import lax


def vary_alike[T](tree: T, *others: Any) -> T:
    """`tree`, its arrays varying over every axis that any of them or of `others` varies over.

    The gradient of an array that varied over less is summed over the axes added, here and once: so
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
