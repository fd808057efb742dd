"""The line of `turbo_decode`: gqa_decode's pairs, over pages of codes."""

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from jaxattn.core.turbo_slots import GROUP
from jaxattn.kernels.gqa_decode.pairs import Pairs
from jaxattn.kernels.gqa_turbo.codes import GROUPS
from jaxattn.kernels.gqa_turbo.memory import whole_steps
from jaxattn.kernels.mla_decode.schedule import PAGE


@dataclasses.dataclass(frozen=True)
class CodedPairs(Pairs):
    """`kv_ref` is uint8 [L, N Hk, C / 16, rows, 32]: groups of 16 tokens of a page and head."""

    @property
    def page_size(self) -> int:
        return int(self.kv_ref.shape[2]) * GROUP

    def copies(
        self, pair: jax.Array, numbers: list[jax.Array], step: jax.Array, to: Any
    ) -> list[tuple[Any, Any]]:
        """(from, to) of a step's codes, as much as lies together at a time.

        Args:
            numbers: of `Pairs.numbers`.
            to: [4, rows and more, 32] in shared memory.
        """
        size, head = self.page_size, self.row_and_head(pair)[1]
        of_head = [self.kv_ref.at[self.layer, n * self.kv_heads + head] for n in numbers]
        if whole_steps(size):
            inside = lax.rem(step + self.first_step_of(pair), size // PAGE) * GROUPS
            return [(of_head[0].at[pl.ds(inside, GROUPS)], to)]
        rows = pl.ds(0, self.kv_ref.shape[3])
        groups = [page.at[j] for page in of_head for j in range(size // GROUP)]
        return [(group, to.at[i, rows]) for i, group in enumerate(groups)]
