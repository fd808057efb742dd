"""The iteration of a CTA over its part of `turbo_decode`: gqa_decode's pairs, in pages of codes."""

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from jaxattn.core.turboquant.codec import TurboFormat
from jaxattn.core.turboquant.slot_layout import GROUP
from jaxattn.kernels.attention.split_kv_schedule import PAGE
from jaxattn.kernels.gqa.decode.split_kv.work_iterator import HeadWorkIterator
from jaxattn.kernels.turboquant.smem import ROW, whole_steps


@dataclasses.dataclass(frozen=True)
class TurboWorkIterator(HeadWorkIterator):
    """The iteration over a part of pairs, over pages of codes.

    Attributes:
        form: The format of the cache.
        tokens: C.
        kv_ref: The result of `coded_view`.
    """

    form: TurboFormat
    tokens: int

    @property
    def page_size(self) -> int:
        return self.tokens

    def copies(
        self, pair: jax.Array, numbers: list[jax.Array], step: jax.Array, to: Any
    ) -> list[tuple[Any, Any]]:
        """Returns the (source, destination) pairs of a step's codes, one for each contiguous run.

        Args:
            numbers: The result of `HeadWorkIterator.numbers_of`.
            to: A step of `TurboDecodeSmem.codes`.
        """
        head = self.row_and_head(pair)[1]
        places = [n * self.kv_heads + head for n in numbers]
        if whole_steps(self.tokens):
            inside = lax.rem(step + self.first_step_of(pair), self.tokens // PAGE)
            return [(self.kv_ref.at[self.layer, places[0], inside], to)]
        rows, groups = GROUP * self.form.slot_bytes // ROW, self.tokens // GROUP
        firsts = [(place * groups + j) * rows for place in places for j in range(groups)]
        return [
            (self.kv_ref.at[self.layer, pl.ds(first, to.shape[1])], to.at[i])
            for i, first in enumerate(firsts)
        ]
