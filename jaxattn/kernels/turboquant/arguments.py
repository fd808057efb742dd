"""The arguments of a call of `turbo_attention` that the decode kernel takes."""

import dataclasses
from typing import ClassVar

import jax

from jaxattn.core.turboquant.codec import TurboFormat
from jaxattn.kernels.gqa.decode.arguments import GqaDecodeCall


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TurboDecodeCall(GqaDecodeCall):
    """The arguments of one call.

    Attributes:
        form: The cache's format.
    """

    op: ClassVar[str] = "turbo_attention"

    form: TurboFormat = dataclasses.field(metadata={"static": True})

    @property
    def page_size(self) -> int:
        return self.form.page_size(self.kv_cache)
