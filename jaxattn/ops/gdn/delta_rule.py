"""In what the delta rules differ: a decay per value head (GDN), or per channel of the key (KDA)."""

import dataclasses

from jaxattn.ops.gdn.chunk_xla import MakeOperands, head_operands


@dataclasses.dataclass(frozen=True)
class DeltaRule:
    """A delta rule.

    Attributes:
        operands: what the scan over chunks meets, of the rule's decays.
        channels: g is [B, T, Hv, Dk], and not [B, T, Hv].
        sigmoid: the gated norm behind the rule has sigmoid(z), and not silu(z).
    """

    operands: MakeOperands
    channels: bool = False
    sigmoid: bool = False


GATED = DeltaRule(head_operands)
