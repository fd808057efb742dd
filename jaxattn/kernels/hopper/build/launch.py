"""The launch of every kernel: a body and its refs, by name.

    out = launch(
        body,
        name="rms_norm",
        grid={"token": 17},
        inputs={"x_ref": x, "layer_ref": layer},
        outputs={"out_ref": jax.ShapeDtypeStruct(x.shape, x.dtype)},
        scratch={"sums_smem": plgpu.SMEM((128,), jnp.float32)},
    )["out_ref"]

calls `body(x_ref=..., layer_ref=..., out_ref=..., sums_smem=...)` in each warpgroup of each CTA.
The launch omits entries that are None, and the body receives None for them: a kernel with an
optional operand reads as one without. To update an array in place, pass a `jax.new_ref` of it among
the inputs.
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
        body: Takes a ref for each name of inputs, outputs and scratch.
        name: The kernel's name, as profilers show it.
        grid: The axes and their numbers of CTAs; the last axis runs fastest.
        inputs: Arrays, and refs of arrays to update in place, or tuples of them.
        outputs: `jax.ShapeDtypeStruct` of new arrays, or a tuple of them.
        scratch: The shared memory and barriers of a CTA.
        cluster: The axis of the CTAs that share a cluster, and their number.
        warpgroups: The warpgroups of a CTA, the axis "wg". None: one, without such an axis.
        compiler_params: None means the defaults.
        interpret: Whether the Mosaic interpreter runs the kernel, on any device; fresh memory is
            NaN.

    Raises:
        ValueError: Two of inputs, outputs and scratch have the same name.
        Refusal: `scratch` exceeds the shared memory of a CTA.
    """
    names = [*inputs, *outputs, *scratch]
    if twice := sorted({each for each in names if names.count(each) > 1}):
        raise ValueError(
            f"{name}: inputs, outputs and scratch must have different names; {twice} are used more "
            "than once"
        )
    given, made, used = (
        {key: x for key, x in some.items() if x is not None} for some in (inputs, outputs, scratch)
    )

    room = SHARED_BYTES - RESERVED_BYTES
    if not interpret and (needed := shared_bytes(used.values())) > room:
        raise Refusal(
            f"{name}: a CTA needs {needed:,} bytes of shared memory, but a Hopper multiprocessor "
            f"has only {room:,}"
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
