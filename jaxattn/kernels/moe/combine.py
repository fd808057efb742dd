"""A token's sum over its experts, in the order of its ids: a CTA for some columns of a token.

Limits: at least 128 columns, a multiple of 64. Reference and tests: `jaxattn.ops.moe.experts`
(implementation="xla"), tests/kernels/moe/test_kernel.py.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.reduce.rms_norm_prologue import WeightedRows
from jaxattn.kernels.moe.panel_matrix import PanelMatrix

THREADS = 128


class ExpertOutputs:
    """The outputs of a token's experts, before they are summed.

    Args: those of `combine`, and its modes.
    """

    def __init__(
        self,
        y: jax.Array,
        positions: jax.Array,
        weights: jax.Array,
        panels: PanelMatrix,
        features: int,
        columns: int,
        modes: dict[str, Any],
    ) -> None:
        self.y, self.positions, self.weights = y, positions, weights.astype(jnp.float32)
        self.panels, self.features, self.columns, self.modes = panels, features, columns, modes

    @functools.cached_property
    def total(self) -> jax.Array:
        """float32 [T, F], computed by a launch of its own."""
        return combine(
            self.y, self.positions, self.weights, results=self.panels, features=self.features,
            columns=self.columns, **self.modes,
        )  # fmt: skip

    @property
    def parts(self) -> WeightedRows:
        """The outputs for one token, for the launch that norms the sum."""
        panels = self.panels
        return WeightedRows(
            rows=self.y, positions=self.positions, weights=self.weights, first=panels.first,
            height=panels.rows,
        )  # fmt: skip


def combine(
    y: jax.Array,
    positions: jax.Array,
    weights: jax.Array,
    *,
    results: PanelMatrix,
    features: int,
    columns: int,
    dtype: DTypeLike = jnp.float32,
    interpret: bool = False,
    detect_races: bool = False,
) -> jax.Array:
    """Returns [T, F]: the sum over k of `weights[t, k] * y[positions[t * K + k]]`, 0 for -1.

    Args:
        y: A 2-D array of floats, in which `results` locates the rows.
        features: F. Later columns of `results` are unused.
        columns: The most columns of the output per CTA.
        dtype: The output's dtype; sums are float32.
    """
    tokens, top_k = weights.shape
    columns = math.gcd(results.width, columns)
    loaded = (8, 4, 2, 1) if y.dtype.itemsize == 2 else (4, 2, 1)
    vector = next(n for n in loaded if columns % (n * THREADS) == 0)
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=vector)

    def full(value: Any) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(value, (columns,), []), layout)

    whole, rest = divmod(features, columns)

    def body(
        y_ref: Any, positions_ref: Any, weights_ref: Any, out_ref: Any, rest_smem: Any = None
    ) -> None:
        token, piece = lax.axis_index("token"), lax.axis_index("piece")
        first = piece * columns
        of_panel = results.first + lax.div(first, results.width) * results.rows
        some = pl.ds(pl.multiple_of(lax.rem(first, results.width), columns), columns)
        places = [positions_ref[token * top_k + k] for k in range(top_k)]
        rows = [
            plgpu.load(y_ref.at[of_panel + jnp.maximum(place, 0), some], layout=layout)
            for place in places
        ]
        total = full(jnp.float32(0))
        for k, (place, row) in enumerate(zip(places, rows, strict=True)):
            # A select, and not a product: without an expert, the loaded numbers may be NaN.
            share = row.astype(jnp.float32) * full(weights_ref[token, k])
            total += jnp.where(full(place) >= 0, share, full(jnp.float32(0)))

        @pl.when(piece < whole)
        def _store():
            out_ref.at[token, pl.ds(pl.multiple_of(first, columns), columns)][...] = total.astype(
                dtype
            )

        if rest_smem is not None:

            @pl.when(piece == whole)
            def _store_rest():
                rest_smem[...] = total.astype(dtype)
                plgpu.commit_smem()
                last = out_ref.at[token, pl.ds(whole * columns, rest)]
                plgpu.copy_smem_to_gmem(rest_smem.at[pl.ds(0, rest)], last)
                plgpu.wait_smem_to_gmem(0)

    weights = weights.astype(jnp.float32)
    return launch(
        body,
        name="moe_combine",
        # Pallas reverses the axes: CUDA's x, the last one here, has room for more than 65,535
        # tokens.
        grid={"piece": whole + (rest > 0), "token": tokens},
        inputs={"y_ref": y, "positions_ref": positions, "weights_ref": weights},
        outputs={"out_ref": jax.ShapeDtypeStruct((tokens, features), dtype)},
        scratch={"rest_smem": plgpu.SMEM((columns,), dtype) if rest else None},
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        detect_races=detect_races,
    )["out_ref"]
