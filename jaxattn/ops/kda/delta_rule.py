"""Kimi's delta rule among the delta rules (`jaxattn.ops.gdn.delta_rule`)."""

from jaxattn.ops.gdn.delta_rule import DeltaRule
from jaxattn.ops.kda.channel_decay import channel_operands

KIMI = DeltaRule(channel_operands, channels=True, sigmoid=True)
