"""The launch of every kernel: a body and its references, by name.

    out = launch(
        body,
        name="rms_norm",
        grid={"token": 17},
        inputs={"x_ref": x, "layer_ref": layer},
        outputs={"out_ref": jax.ShapeDtypeStruct(x.shape, x.dtype)},
        scratch={"sums_smem": plgpu.SMEM((128,), jnp.float32)},
    )["out_ref"]

calls `body(x_ref=..., layer_ref=..., out_ref=..., sums_smem=...)` in each warpgroup of each block.
What is None is left out of the launch, and the body gets None for it: a kernel with an optional
operand reads as one without. An array that is updated in place is a `jax.new_ref` among the inputs.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal, kernels_untraced
from jaxattn.kernels.hopper.build.interpreter import interpret_mode
from jaxattn.kernels.hopper.build.trace_cache import trace_once
from jaxattn.kernels.hopper.device import RESERVED_BYTES, SHARED_BYTES, shared_bytes

type Named = Mapping[str, Any]
NOTHING: Named = {}


def launch(
    body: Callable[..., None],
    *,
    name: str,
    grid: Mapping[str, int],
    inputs: Named,
    outputs: Named = NOTHING,
    scratch: Named = NOTHING,
    cluster: Mapping[str, int] = NOTHING,
    warpgroups: int | None = 1,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: bool = False,
) -> dict[str, Any]:
    """Runs a kernel, and returns its outputs by name.

    Args:
        body: takes a reference for each name of inputs, outputs and scratch.
        name: of the kernel, as profilers show it.
        grid: axes and blocks; the last runs fastest.
        inputs: arrays, and references to what is updated in place, or tuples of them.
        outputs: `jax.ShapeDtypeStruct` of new arrays, or a tuple of them.
        scratch: shared memory and barriers of a block.
        cluster: the axis of the blocks that share a cluster, and their number.
        warpgroups: of a block, the axis "wg". None: one, and no such axis.
        compiler_params: None takes the defaults.
        interpret: under the Mosaic interpreter, on any device; fresh memory is NaN.

    Raises:
        ValueError: two of inputs, outputs and scratch have one name.
        Refusal: `scratch` is more shared memory than a block has.
    """
    names = [*inputs, *outputs, *scratch]
    if twice := sorted({each for each in names if names.count(each) > 1}):
        raise ValueError(f"{name}: inputs, outputs and scratch share the names {twice}")
    given, made, used = (
        {key: x for key, x in some.items() if x is not None} for some in (inputs, outputs, scratch)
    )

    room = SHARED_BYTES - RESERVED_BYTES
    if not interpret and (needed := shared_bytes(used.values())) > room:
        raise Refusal(
            f"{name}: a block would keep {needed:,} bytes in shared memory, and a Hopper "
            f"multiprocessor gives it {room:,}"
        )

    def run(*refs: Any) -> None:
        if kernels_untraced.value:
            return
        there = dict(zip([*given, *made, *used], refs, strict=True))
        body(**{each: there.get(each) for each in names})

    kernel = plgpu.kernel(
        run,
        out_type=tuple(made.values()),
        scratch_types=list(used.values()),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        cluster=tuple(cluster.values()),
        cluster_names=tuple(cluster),
        num_threads=warpgroups,
        thread_name=None if warpgroups is None else "wg",
        kernel_name=name,
        compiler_params=compiler_params,
        interpret=interpret_mode(interpret),
    )
    limits = grid, cluster, warpgroups, compiler_params, interpret
    kernel = trace_once(name, kernel, body, tuple(given), made, used, *limits)
    with jax.enable_x64(False):  # a kernel's integers are int32
        return dict(zip(made, kernel(*given.values()), strict=True))
