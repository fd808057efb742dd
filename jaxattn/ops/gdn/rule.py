"""In what the delta rules differ: a decay per value head (GDN), or per channel of the key (KDA)."""

import dataclasses

from jaxattn.kernels.gdn_prefill.channels import Make
from jaxattn.ops.gdn.chunk_xla import MakeOperands, head_operands


@dataclasses.dataclass(frozen=True)
class Rule:
    """A delta rule.

    Attributes:
        operands: what the scan over chunks meets, of the rule's decays.
        channels: g is [B, T, Hv, Dk], and not [B, T, Hv].
        sigmoid: the gated norm behind the rule has sigmoid(z), and not silu(z).
        make: of decays per channel, what the kernel takes of each chunk.
    """

    operands: MakeOperands
    channels: bool = False
    sigmoid: bool = False
    make: Make | None = None


GATED = Rule(head_operands)
