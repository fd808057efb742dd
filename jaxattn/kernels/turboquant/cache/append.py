"""Norms, rotation, quantization and write of new tokens' heads: a CTA of one warpgroup per token
and head.

Norms, rotation by position and the division into CTAs are those of gqa_append. A CTA with a key and
a value then puts both in shared memory, and two warps convert them to codes (quantization.py). A
token owns whole bytes: nothing of the page is read.

Limits: D 64, 128 or 256, H and Hk even where D is 64, any preset and number of tokens.
Reference: `jaxattn.gqa.turbo_append` (implementation="xla"); tests:
tests/kernels/turboquant/test_append.py.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import without_gradient
from jaxattn.core.turboquant.codec import TurboFormat, quantize
from jaxattn.core.turboquant.slot_layout import GROUP, pack, places
from jaxattn.kernels.gqa.append import GqaAppendCta, heads_together, launch_append, refuse
from jaxattn.kernels.hopper.device import require_hopper
from jaxattn.kernels.hopper.ptx import single
from jaxattn.kernels.turboquant.cache.quantization import TurboQuantizer

LINES = 5  # of shared memory: three for the rotation, a key's and a value's


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurboAppendCta(GqaAppendCta):
    """A CTA of the append kernel.

    Attributes:
        form: The cache's format.
    """

    form: TurboFormat
    interpret: bool

    def write(
        self, place: tuple[Any, ...], mine: jax.Array, key: jax.Array, value: jax.Array, refs: Any
    ) -> None:
        layer, page, at = place
        smem, width = refs["smem"], self.width
        for i, x in enumerate((key, value)):
            smem.at[pl.ds((3 + i) * width, width)][...] = x
        plgpu.commit_smem()
        heads = heads_together(self.head_dim)
        lines, pages = smem.at[pl.ds(3 * width, 2 * width)], refs["cache_ref"].at[layer, page]
        if self.interpret:
            for i in range(heads):
                key, value = (
                    lines[pl.ds(kind * width + i * self.head_dim, self.head_dim)] for kind in (0, 1)
                )
                self._write_head(pages.at[mine * heads + i], at, key, value)
            return
        coder = TurboQuantizer(self.form, heads, pages.shape[-1])
        splat, plain = plgpu.Layout.WG_SPLAT, plgpu.RefType()

        def run(ctx: Any, line: Any, page: Any, head: Any, at: Any) -> None:
            coder.write(line, page, single(head), single(at))

        plgpu.inline_mgpu(arg_types=(plain, plain, splat, splat))(run)(
            lines, pages, jnp.int32(mine * heads), jnp.int32(at)
        )

    def _write_head(self, page: Any, at: jax.Array, key: jax.Array, value: jax.Array) -> None:
        """Writes contiguous bytes at a time, in the interpreter."""
        form, table = self.form, places(self.form)
        slot = pack(form, quantize(form, key[None], value[None]))[0]
        token = lax.rem(at, GROUP)
        group = lax.div(at, GROUP) * (GROUP * form.slot_bytes)
        ends = np.cumsum([form.key_bytes, form.value_bytes, form.meta_bytes]).tolist()
        kinds = ((8, 2 if form.key_bits == 3 else 4), (4, 1), (1, 2))
        for first, end, (step, run) in zip([0, *ends], ends, kinds, strict=False):
            # The offsets of a token's bytes from token 0's: one for each `step` tokens, and one for
            # each of those in between.
            large, small = (int(table[n, first] - table[0, first]) for n in (step, 1))
            shift = group + lax.div(token, step) * large + lax.rem(token, step) * small
            for n in range(first, end, run):
                page[pl.ds(shift + int(table[0, n]), run)] = slot[n : n + run]


def turbo_append_mosaic(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    weights: jax.Array | None,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    form: TurboFormat,
    angles: jax.Array,
    interleaved: bool,
    eps: float,
    dtype: Any,
    query_lens: jax.Array | None = None,
    layer: jax.Array | int | None = None,
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`jaxattn.gqa.turbo_append` on a Hopper GPU, with the same arguments."""
    op = "turbo_append"
    require_hopper(op, interpret=interpret)
    refuse(op, q.shape[2], *k.shape[2:])
    q, k, v, weights, angles = without_gradient(
        op, (q, k, v, weights, angles), "q k v weights rotation", train_with="gqa_attention"
    )
    cache_ref = jax.new_ref(kv_cache if layer is not None else kv_cache[None])
    (out,) = launch_append(
        op, functools.partial(TurboAppendCta, form=form, interpret=interpret), q, k, v, weights,
        cache_ref, block_tables, seq_lens, angles=angles, page_size=form.page_size(kv_cache),
        interleaved=interleaved, eps=eps, dtype=dtype, query_lens=query_lens, layer=layer,
        lines=LINES, interpret=interpret, detect_races=detect_races,
    )  # fmt: skip
    return out, jax.freeze(cache_ref).reshape(kv_cache.shape)
